"""Typing in an open text editor, and saving."""

from osworld_pipeline.evaluation.suites.family import (
    DONE,
    HOME,
    Arguments,
    Family,
    Scene,
    Screen,
    draw_two_words,
    press,
    type_text,
)
from osworld_pipeline.evaluation.suites.verbs import Verb, file_holds_text, launch, run_shell, wait_for_window

NOTE = f"{HOME}/Documents/note.txt"


def open_editor(content: str) -> tuple[Verb, ...]:
    return (
        run_shell(f"mkdir -p {HOME}/Documents && printf '%s' '{content}' > {NOTE}"),
        launch("mousepad", NOTE),
        wait_for_window("note.txt"),
    )


def _type_text(arguments: Arguments, screen: Screen) -> Scene:
    text = " ".join(map(str, arguments))
    return Scene(
        instruction=f"Type {text} and save the file.",
        config=open_editor(""),
        evaluator=file_holds_text(NOTE, text),
        oracle=(type_text(f"Type {text}", text), press("Save", "ctrl", "s"), DONE),
    )


def _replace_text(arguments: Arguments, screen: Screen) -> Scene:
    old, new = arguments
    return Scene(
        instruction=f"Replace {old} with {new} and save the file.",
        config=open_editor(str(old)),
        evaluator=file_holds_text(NOTE, str(new)),
        oracle=(
            press("Select all", "ctrl", "a"),
            type_text(f"Type {new}", str(new)),
            press("Save", "ctrl", "s"),
            DONE,
        ),
    )


FAMILIES = (
    Family(name="type_text", domain="editor", draw=draw_two_words, make_scene=_type_text),
    Family(name="replace_text", domain="editor", draw=draw_two_words, make_scene=_replace_text),
)
