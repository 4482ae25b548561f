"""Operations on one of two windows in random corners of the screen."""

import random

from osworld_pipeline.evaluation.suites.family import (
    DONE,
    FRAME_HEIGHT,
    WORDS,
    Arguments,
    Family,
    Rectangle,
    Scene,
    Screen,
    click,
    press,
)
from osworld_pipeline.evaluation.suites.verbs import holds, open_titled_window, window_list


def _draw_windows(rng: random.Random) -> Arguments:
    return (*rng.sample(WORDS, 2), *rng.sample(range(4), 2))


def _place(cell: str | int, screen: Screen) -> Rectangle:
    width, height = screen.scaled(200), screen.scaled(90)
    return screen.in_cell(int(cell), columns=2, rows=2, width=width, height=height, frame_height=FRAME_HEIGHT)


def _close_window(arguments: Arguments, screen: Screen) -> Scene:
    target, other, target_cell, other_cell = arguments
    target_place = _place(target_cell, screen)
    windows = sorted([(str(target), target_place), (str(other), _place(other_cell, screen))], key=lambda item: item[0])
    return Scene(
        instruction=f"Close the window {target}.",
        # In alphabetical order: the target is in front as often as behind.
        config=tuple(verb for title, place in windows for verb in open_titled_window(title, place, screen)),
        evaluator=window_list(include=[str(other)], exclude=[str(target)]),
        oracle=(
            click(f"Select {target}", target_place.center),
            press("Close it", "alt", "f4"),
            DONE,
        ),
    )


def _switch_window(arguments: Arguments, screen: Screen) -> Scene:
    target, other, target_cell, other_cell = arguments
    target_place = _place(target_cell, screen)
    return Scene(
        instruction=f"Switch to the window {target}.",
        # The last one opened has the focus, so the target comes first.
        config=(
            *open_titled_window(str(target), target_place, screen),
            *open_titled_window(str(other), _place(other_cell, screen), screen),
        ),
        evaluator=holds(f'[ "$(xdotool getactivewindow getwindowname)" = {target} ]'),
        oracle=(click(f"Select {target}", target_place.center), DONE),
    )


FAMILIES = (
    Family(name="close_window", domain="windows", draw=_draw_windows, make_scene=_close_window),
    Family(name="switch_window", domain="windows", draw=_draw_windows, make_scene=_switch_window),
)
