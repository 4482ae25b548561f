"""Dialogs: a button whose place only the screenshot shows, a keypad, and a question that is answered."""

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
_ANSWER = f"{HOME}/.answer.txt"
_PRESSED = f"{HOME}/.pressed.txt"
_NUM_BUTTONS = 3
_GRID = 3
"""Buttons stand in a grid of 3 x 3 cells, dialogs in one of 2 x 2."""


def _draw_buttons(rng: random.Random) -> Arguments:
    labels = rng.sample(WORDS, _NUM_BUTTONS)
    cells = rng.sample(range(_GRID * _GRID), _NUM_BUTTONS)
    # The first button is the one to click; which cell that is, nothing but the screen shows.
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
    # Opened in the order of the alphabet, so that neither focus nor stacking tells the target.
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


_KEY_COLUMNS = (("1", "4", "7", ""), ("2", "5", "8", "0"), ("3", "6", "9"))
"""A keypad column by column, as yad fills a form; an empty label keeps its place free."""
_KEY_FONT_PT = 22


def _draw_two_digits(rng: random.Random) -> Arguments:
    return rng.randrange(10), rng.randrange(10)


def _key_center(digit: str, place: Rectangle, font_pt: int) -> list[int]:
    """In pixels. yad gives the columns equal widths; a row is a line of text (1.55 px a point) and 19 px of padding and
    space."""
    column = next(index for index, keys in enumerate(_KEY_COLUMNS) if digit in keys)
    row_height = 1.55 * font_pt + 19
    return [
        place.x + place.width * (2 * column + 1) // 6,
        place.y + round((_KEY_COLUMNS[column].index(digit) + 0.5) * row_height),
    ]


def _press_keys(arguments: Arguments, screen: Screen) -> Scene:
    first, second = map(str, arguments)
    font_pt = screen.scaled(_KEY_FONT_PT)
    place = screen.in_cell(0, columns=1, rows=1, width=screen.scaled(360), height=screen.scaled(216))
    keys = [
        option
        for label in (label for column in _KEY_COLUMNS for label in column)
        for option in (
            (f"--field=<span size='{font_pt * 1000}'>{label}</span>:FBTN", f"sh -c 'printf {label} >> {_PRESSED}'")
            if label
            else ("--field=:LBL", "-")
        )
    ]
    return Scene(
        instruction=f"Press {first} and then {second} on the keypad.",
        config=(
            launch(
                "yad",
                "--title=Keypad",
                "--undecorated",
                "--no-escape",
                "--borders=0",
                f"--geometry={place.geometry}",
                "--no-buttons",
                "--form",
                f"--columns={len(_KEY_COLUMNS)}",
                "--homogeneous",
                *keys,
            ),
            wait_for_window("^Keypad$"),
        ),
        evaluator=holds(f'[ "$(cat {_PRESSED} 2>/dev/null)" = {first}{second} ]'),
        oracle=(
            click(f"Press {first}", _key_center(first, place, font_pt)),
            click(f"Press {second}", _key_center(second, place, font_pt)),
            DONE,
        ),
    )


def _answer_dialog(arguments: Arguments, screen: Screen) -> Scene:
    first, second = map(str, arguments)
    # The place follows from the words: were it drawn, two instances could differ in nothing that an answer depends on.
    cell = (WORDS.index(first) + WORDS.index(second)) % 4
    answer = f"{first} {second}"
    place = screen.in_cell(
        cell, columns=2, rows=2, width=screen.scaled(220), height=screen.scaled(110), frame_height=FRAME_HEIGHT
    )
    return Scene(
        instruction=f"Answer the dialog with {answer}.",
        config=open_entry_dialog("Question", place, screen, answer_path=_ANSWER),
        evaluator=holds(f'[ "$(cat {_ANSWER} 2>/dev/null)" = "{answer}" ]'),
        oracle=(type_text(f"Answer {answer}", f"{answer}\n"), DONE),
    )


FAMILIES = (
    Family(name="click_button", domain="dialogs", draw=_draw_buttons, make_scene=_click_button),
    Family(name="press_keys", domain="dialogs", draw=_draw_two_digits, make_scene=_press_keys),
    Family(name="answer_dialog", domain="dialogs", draw=draw_two_words, make_scene=_answer_dialog),
)
