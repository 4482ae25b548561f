"""Tasks that use two programs."""

from osworld_pipeline.evaluation.suites.family import (
    DESKTOP,
    DONE,
    HOME,
    Arguments,
    Family,
    Rectangle,
    Scene,
    Screen,
    click,
    draw_two_words,
    type_text,
)
from osworld_pipeline.evaluation.suites.verbs import all_of, holds, open_entry_dialog, open_terminal, run_shell

_ANSWER = f"{HOME}/.answer.txt"


def _folder_and_answer(arguments: Arguments, screen: Screen) -> Scene:
    folder, answer = arguments
    width, height = screen.scaled(300), screen.scaled(110)
    dialog = Rectangle(
        x=(screen.width - width) // 2, y=screen.height - height - screen.scaled(30), width=width, height=height
    )
    return Scene(
        instruction=f"Create the folder {folder}, then answer the dialog with {answer}.",
        config=(
            run_shell(f"mkdir -p {DESKTOP}"),
            *open_entry_dialog("Question", dialog, screen, answer_path=_ANSWER),
            # Opened last, the terminal has the focus.
            *open_terminal(screen, geometry="40x4+0+0"),
        ),
        evaluator=all_of(
            holds(f"[ -d {DESKTOP}/{folder} ]"),
            holds(f'[ "$(cat {_ANSWER} 2>/dev/null)" = {answer} ]'),
        ),
        oracle=(
            type_text(f"Create {folder}", f"mkdir {folder}\n"),
            click("Select the dialog", dialog.center),
            type_text(f"Answer {answer}", f"{answer}\n"),
            DONE,
        ),
    )


FAMILIES = (Family(name="folder_and_answer", domain="multi_apps", draw=draw_two_words, make_scene=_folder_and_answer),)
