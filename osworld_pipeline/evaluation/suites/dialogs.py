"""Dialogs: a button whose position only the screenshot shows, a dialog with choices, and one with a text answer."""

import random

from osworld_pipeline.evaluation.suites.family import (
    DONE,
    FRAME_HEIGHT,
    HOME,
    WORDS,
    Arguments,
    Family,
    Rectangle,
    Scene,
    Screen,
    click,
    draw_two_words,
    type_text,
)
from osworld_pipeline.evaluation.suites.verbs import Verb, holds, launch, open_entry_dialog, wait_for_window

_CLICKED = f"{HOME}/.clicked.txt"
ANSWER = f"{HOME}/.answer.txt"
_CHOSEN = f"{HOME}/.chosen.txt"
_NUM_BUTTONS = 3
_GRID = 3
"""Buttons are in a grid of 3 x 3 cells."""


def _draw_buttons(rng: random.Random) -> Arguments:
    labels = rng.sample(WORDS, _NUM_BUTTONS)
    cells = rng.sample(range(_GRID * _GRID), _NUM_BUTTONS)
    # The first button is the one to click; only the screen shows its cell.
    return (*labels, *cells)


def _open_button(label: str, place: Rectangle, screen: Screen) -> Verb:
    return launch(
        "yad",
        f"--title={label}",
        "--undecorated",
        "--no-escape",
        "--borders=0",
        f"--geometry={place.geometry}",
        "--no-buttons",
        "--form",
        f"--field=<span size='{screen.scaled(22) * 1000}'>{label}</span>:FBTN",
        # Every click is kept, so that clicking all of them solves nothing.
        f"sh -c 'echo {label} >> {_CLICKED}'",
    )


def _click_button(arguments: Arguments, screen: Screen) -> Scene:
    labels = [str(label) for label in arguments[:_NUM_BUTTONS]]
    width, height = screen.scaled(128), screen.scaled(52)
    places = [
        screen.in_cell(int(cell), columns=_GRID, rows=_GRID, width=width, height=height)
        for cell in arguments[_NUM_BUTTONS:]
    ]
    # Opened in alphabetical order, so that neither focus nor stacking reveals the target.
    buttons = sorted(zip(labels, places, strict=True), key=lambda button: button[0])
    return Scene(
        instruction=f"Click the button {labels[0]}.",
        config=(
            *(_open_button(label, place, screen) for label, place in buttons),
            *(wait_for_window(f"^{label}$") for label, _ in buttons),
        ),
        evaluator=holds(f'[ "$(cat {_CLICKED} 2>/dev/null)" = {labels[0]} ]'),
        oracle=(click(f"Click {labels[0]}", places[0].center), DONE),
    )


_CHOICES = ("Save", "Discard", "Cancel")
_CHOICE_FONT_PT = 16


def _draw_choice(rng: random.Random) -> Arguments:
    return (rng.choice(_CHOICES), *draw_two_words(rng))


def _choose_in_dialog(arguments: Arguments, screen: Screen) -> Scene:
    choice, first, second = map(str, arguments)
    font_pt = screen.scaled(_CHOICE_FONT_PT)
    place = screen.in_cell(
        0, columns=1, rows=1, width=screen.scaled(360), height=screen.scaled(60), frame_height=FRAME_HEIGHT
    )
    buttons = [
        option
        for label in _CHOICES
        for option in (
            f"--field=<span size='{font_pt * 1000}'>{label}</span>:FBTN",
            # Every click is kept, so that pressing all of them solves nothing.
            f"sh -c 'echo {label} >> {_CHOSEN}'",
        )
    ]
    # A button takes about a third of the width. Padding adds 14 px to a line of text, which has 1.55 px a point.
    center = [
        place.x + place.width * (2 * _CHOICES.index(choice) + 1) // (2 * len(_CHOICES)),
        place.y + FRAME_HEIGHT + round((1.55 * font_pt + 14) / 2),
    ]
    title = f"{first} and {second}"
    return Scene(
        instruction=f"Choose {choice} in the dialog about {title}.",
        config=(
            launch(
                "yad",
                f"--title={title}",
                "--no-escape",
                "--borders=0",
                f"--geometry={place.geometry}",
                "--no-buttons",
                "--form",
                f"--columns={len(_CHOICES)}",
                "--homogeneous",
                *buttons,
            ),
            wait_for_window(f"^{title}$"),
        ),
        evaluator=holds(f'[ "$(cat {_CHOSEN} 2>/dev/null)" = {choice} ]'),
        oracle=(click(f"Choose {choice}", center), DONE),
    )


def question_place(first: str, second: str, screen: Screen) -> Rectangle:
    """The position of a dialog, computed from its words: if it were random, two instances could differ only in the
    position."""
    cell = (WORDS.index(first) + WORDS.index(second)) % 4
    return screen.in_cell(
        cell, columns=2, rows=2, width=screen.scaled(220), height=screen.scaled(110), frame_height=FRAME_HEIGHT
    )


def _answer_dialog(arguments: Arguments, screen: Screen) -> Scene:
    first, second = map(str, arguments)
    answer = f"{first} {second}"
    return Scene(
        instruction=f"Answer the dialog with {answer}.",
        config=open_entry_dialog("Question", question_place(first, second, screen), screen, answer_path=ANSWER),
        evaluator=holds(f'[ "$(cat {ANSWER} 2>/dev/null)" = "{answer}" ]'),
        oracle=(type_text(f"Answer {answer}", f"{answer}\n"), DONE),
    )


CHOOSE_IN_DIALOG = Family(name="choose_in_dialog", domain="dialogs", draw=_draw_choice, make_scene=_choose_in_dialog)
FAMILIES = (
    Family(name="click_button", domain="dialogs", draw=_draw_buttons, make_scene=_click_button),
    CHOOSE_IN_DIALOG,
    Family(name="answer_dialog", domain="dialogs", draw=draw_two_words, make_scene=_answer_dialog),
)
