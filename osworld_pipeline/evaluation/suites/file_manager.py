"""Tasks with folders in an open file manager, through its dialogs."""

from osworld_pipeline.evaluation.suites.family import (
    DESKTOP,
    DONE,
    Arguments,
    Family,
    Scene,
    Screen,
    draw_two_words,
    press,
    type_text,
)
from osworld_pipeline.evaluation.suites.verbs import Verb, holds, launch, run_shell, wait_for_window

_FOLDER = f"{DESKTOP}/work"


def _open_file_manager(*folders: str) -> tuple[Verb, ...]:
    paths = " ".join(f"{_FOLDER}/{name}" for name in folders)
    return (
        run_shell(f"mkdir -p {_FOLDER} {paths}".strip()),
        launch("pcmanfm", _FOLDER),
        wait_for_window("^work$"),
    )


def _create_folder(arguments: Arguments, screen: Screen) -> Scene:
    name = "-".join(map(str, arguments))
    return Scene(
        instruction=f"Create the folder {name}.",
        config=_open_file_manager(),
        evaluator=holds(f"[ -d {_FOLDER}/{name} ]"),
        oracle=(press("New folder", "ctrl", "shift", "n"), type_text(f"Name it {name}", f"{name}\n"), DONE),
    )


def _rename_in_files(arguments: Arguments, screen: Screen) -> Scene:
    old, new = arguments
    return Scene(
        instruction=f"Rename {old} to {new} in the file manager.",
        config=_open_file_manager(str(old)),
        evaluator=holds(f"[ -d {_FOLDER}/{new} ] && [ ! -e {_FOLDER}/{old} ]"),
        oracle=(
            press("Select all", "ctrl", "a"),
            press("Rename", "f2"),
            type_text(f"Name it {new}", f"{new}\n"),
            DONE,
        ),
    )


FAMILIES = (
    Family(name="create_folder", domain="files", draw=draw_two_words, make_scene=_create_folder),
    Family(name="rename_in_files", domain="files", draw=draw_two_words, make_scene=_rename_in_files),
)
