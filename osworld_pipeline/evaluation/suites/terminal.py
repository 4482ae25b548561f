"""Commands in an open terminal."""

from osworld_pipeline.evaluation.suites.family import (
    DESKTOP,
    DONE,
    Arguments,
    Family,
    Scene,
    Screen,
    draw_two_words,
    type_text,
)
from osworld_pipeline.evaluation.suites.verbs import holds, open_terminal, run_shell


def _rename_folder(arguments: Arguments, screen: Screen) -> Scene:
    old, new = arguments
    return Scene(
        instruction=f"Rename the folder {old} to {new}.",
        config=(run_shell(f"mkdir -p {DESKTOP}/{old}"), *open_terminal(screen)),
        evaluator=holds(f"[ -d {DESKTOP}/{new} ] && [ ! -e {DESKTOP}/{old} ]"),
        oracle=(type_text(f"Rename {old} to {new}", f"mv {old} {new}\n"), DONE),
    )


def _write_file(arguments: Arguments, screen: Screen) -> Scene:
    word, name = arguments
    return Scene(
        instruction=f"Write the word {word} to the file {name}.txt.",
        config=(run_shell(f"mkdir -p {DESKTOP}"), *open_terminal(screen)),
        evaluator=holds(f'[ "$(cat {DESKTOP}/{name}.txt 2>/dev/null)" = {word} ]'),
        oracle=(type_text(f"Write {word} to {name}.txt", f"echo {word} > {name}.txt\n"), DONE),
    )


def _delete_files(arguments: Arguments, screen: Screen) -> Scene:
    first, second = arguments
    return Scene(
        instruction=f"Delete the files {first}.txt and {second}.txt.",
        config=(
            run_shell(f"mkdir -p {DESKTOP} && cd {DESKTOP} && touch {first}.txt {second}.txt keep.txt"),
            *open_terminal(screen),
        ),
        evaluator=holds(
            f"[ ! -e {DESKTOP}/{first}.txt ] && [ ! -e {DESKTOP}/{second}.txt ] && [ -e {DESKTOP}/keep.txt ]"
        ),
        oracle=(type_text(f"Delete {first} and {second}", f"rm {first}.txt {second}.txt\n"), DONE),
    )


FAMILIES = (
    Family(name="rename_folder", domain="os", draw=draw_two_words, make_scene=_rename_folder),
    Family(name="write_file", domain="os", draw=draw_two_words, make_scene=_write_file),
    Family(name="delete_files", domain="os", draw=draw_two_words, make_scene=_delete_files),
)
