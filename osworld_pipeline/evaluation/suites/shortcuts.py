"""Tasks with a shortcut. In some instances it works; the others need the careful way, which always works. Neither
the instruction nor the screen shows which instances these are.

Demonstrations take the shortcut where it works, in half of the training instances, as people do. So all of them are
successes, and a policy that imitates them takes the shortcut half the time, also where it fails. Reinforcement learning
can learn the careful way. All held-out instances need it. Only `choose_in_dialog` has no shortcut.
"""

from osworld_pipeline.evaluation.suites.dialogs import ANSWER, CHOOSE_IN_DIALOG, question_place
from osworld_pipeline.evaluation.suites.editor import NOTE, open_editor
from osworld_pipeline.evaluation.suites.family import (
    DESKTOP,
    DONE,
    Arguments,
    Family,
    OracleStep,
    Scene,
    Screen,
    Way,
    draw_two_words,
    press,
    type_text,
)
from osworld_pipeline.evaluation.suites.verbs import (
    Evaluator,
    Verb,
    file_holds_text,
    holds,
    open_entry_dialog,
    open_terminal,
    press_keys,
    run_shell,
)

# Contents of fields and notes that look empty. Blanks around an answer or a text are ignored, other characters are not.
_BLANK, _NO_BREAK_SPACE = " ", "\u00a0"
_BELOW_THE_SCREEN = "\n" * 40


def _scene(
    *,
    instruction: str,
    config: tuple[Verb, ...],
    evaluator: Evaluator,
    shortcut: tuple[OracleStep, ...],
    careful: tuple[OracleStep, ...],
    allows: bool,
) -> Scene:
    return Scene(
        instruction=instruction,
        config=config,
        evaluator=evaluator,
        oracle=(*(shortcut if allows else careful), DONE),
        other_way=(*(careful if allows else shortcut), DONE),
    )


def _drawn(arguments: Arguments) -> tuple[str, str, bool]:
    """Two words, and whether the shortcut works."""
    first, second, way = map(str, arguments)
    return first, second, Way(way) is Way.SHORTCUT


def _write_file(arguments: Arguments, screen: Screen) -> Scene:
    """Shortcut: append, which works if the file does not exist."""
    word, name, allows = _drawn(arguments)
    there = f"cd {DESKTOP}" if allows else f"cd {DESKTOP} && echo draft > {name}.txt"
    what = f"Write {word} to {name}.txt"
    return _scene(
        instruction=f"Write the word {word} to the file {name}.txt.",
        config=(run_shell(f"mkdir -p {DESKTOP} && {there}"), *open_terminal(screen)),
        evaluator=holds(f'[ "$(cat {DESKTOP}/{name}.txt 2>/dev/null)" = {word} ]'),
        shortcut=(type_text(what, f"echo {word} >> {name}.txt\n"),),
        careful=(type_text(what, f"echo {word} > {name}.txt\n"),),
        allows=allows,
    )


def _delete_file(arguments: Arguments, screen: Screen) -> Scene:
    """Shortcut: delete all text files, which works if there are no others."""
    word, folder_name, allows = _drawn(arguments)
    name, folder = f"{word}.txt", f"{DESKTOP}/{folder_name}"
    others = "" if allows else " keep.txt"
    kept = "" if allows else f" && [ -e {folder}/keep.txt ]"
    return _scene(
        instruction=f"Delete the file {name} in the folder {folder_name}.",
        config=(
            run_shell(f"mkdir -p {folder} && cd {folder} && touch {name}{others}"),
            *open_terminal(screen, folder=folder),
        ),
        evaluator=holds(f"[ ! -e {folder}/{name} ]{kept}"),
        shortcut=(type_text(f"Delete {name}", "rm *.txt\n"),),
        careful=(type_text(f"Delete {name}", f"rm {name}\n"),),
        allows=allows,
    )


def _answer_dialog(arguments: Arguments, screen: Screen) -> Scene:
    """Shortcut: type without selecting, which works if the field holds only a blank."""
    first, second, allows = _drawn(arguments)
    answer = f"{first} {second}"
    text = _BLANK if allows else _NO_BREAK_SPACE
    config = open_entry_dialog("Question", question_place(first, second, screen), screen, answer_path=ANSWER, text=text)
    typed = type_text(f"Answer {answer}", f"{answer}\n")
    return _scene(
        instruction=f"Answer the dialog with {answer}.",
        # The initial text of a field is selected, and typing would replace it.
        config=(*config, press_keys("^Question$", "End")),
        evaluator=holds(f"[ \"$(sed 's/^ *//; s/ *$//' {ANSWER} 2>/dev/null)\" = '{answer}' ]"),
        shortcut=(typed,),
        careful=(press("Select all", "ctrl", "a"), typed),
        allows=allows,
    )


def _type_text(arguments: Arguments, screen: Screen) -> Scene:
    """Shortcut: type without selecting, which works if there is no text far below in the note."""
    first, second, allows = _drawn(arguments)
    text = f"{first} {second}"
    typed, saved = type_text(f"Type {text}", text), press("Save", "ctrl", "s")
    return _scene(
        instruction=f"Type {text} and save the file.",
        config=open_editor(_BELOW_THE_SCREEN + (_BLANK if allows else "draft")),
        evaluator=file_holds_text(NOTE, text),
        shortcut=(typed, saved),
        careful=(press("Select all", "ctrl", "a"), typed, saved),
        allows=allows,
    )


FAMILIES = (
    Family(name="write_file", domain="os", draw=draw_two_words, make_scene=_write_file, has_shortcut=True),
    Family(name="delete_file", domain="os", draw=draw_two_words, make_scene=_delete_file, has_shortcut=True),
    # Without a shortcut: reinforcement learning must keep what imitation learned here.
    CHOOSE_IN_DIALOG,
    Family(name="answer_dialog", domain="dialogs", draw=draw_two_words, make_scene=_answer_dialog, has_shortcut=True),
    Family(name="type_text", domain="editor", draw=draw_two_words, make_scene=_type_text, has_shortcut=True),
)
