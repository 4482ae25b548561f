"""Where an action is drawn, in any coordinate space, and what its caption says."""

import json
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from osworld_pipeline.dialects.commands import to_command
from osworld_pipeline.dialects.coordinates import COORDINATE_SPACES, from_screen, to_screen
from osworld_pipeline.web.viewer.marks import Mark, describe, draw_step, find_space, read_action

IMAGE = (1280, 736)
SCREEN = (1920, 1080)


def draw(action: dict[str, Any] | None, command: str | None = None, **changes: Any) -> tuple[Mark, ...]:
    given_ = {"image": IMAGE, "space": "model_pixels", "pointer": None} | changes
    return draw_step(action, command, **given_).marks


@pytest.mark.parametrize(
    ("space", "coordinate"), [("model_pixels", [640, 184]), ("unit", [0.5, 0.25]), ("thousand", [500, 250])]
)
def test_a_click_is_drawn_at_its_place_in_any_coordinate_space(space: Any, coordinate: list[float]) -> None:
    (mark,) = draw({"action": "left_click", "coordinate": coordinate}, space=space)
    assert (mark.kind, mark.x, mark.y, mark.is_outside) == ("point", 640, 184, False)


@pytest.mark.parametrize("space", COORDINATE_SPACES)
def test_the_coordinate_space_is_inferred_from_the_numbers_of_an_episode(space: Any) -> None:
    scale = partial(to_screen, space=space, image=IMAGE, screen=SCREEN)
    turns = []
    for x, y in ((300, 200), (1500, 900), (960, 60)):
        point = from_screen(x, y, space=space, image=IMAGE, screen=SCREEN)
        action = json.loads(json.dumps({"action": "left_click", "coordinate": list(point)}))
        turns.append((action, to_command(action, scale)))
    assert find_space(turns, IMAGE) == space


@given(
    screen=st.sampled_from([(1920, 1080), (1280, 800), (1024, 768), (2560, 1440), (1080, 1920)]),
    places=st.lists(st.tuples(st.floats(0.05, 0.95), st.floats(0.05, 0.95)), min_size=1, max_size=4),
    space=st.sampled_from(["model_pixels", "thousand"]),
)
def test_one_click_distinguishes_pixels_from_thousandths_unless_the_image_is_square(screen, places, space) -> None:
    image = (screen[0] * 2 // 3 // 32 * 32, screen[1] * 2 // 3 // 32 * 32)
    scale = partial(to_screen, space=space, image=image, screen=screen)
    turns = []
    for right, down in places:
        point = from_screen(right * screen[0], down * screen[1], space=space, image=image, screen=screen)
        action = {"action": "left_click", "coordinate": list(point)}
        turns.append((action, to_command(action, scale)))
    assert find_space(turns, image) == space


def test_pixels_are_assumed_if_the_numbers_do_not_decide() -> None:
    typed = ({"action": "type", "text": "a"}, "pyautogui.write('a')")
    assert find_space([typed], IMAGE) == "model_pixels"
    square = ({"action": "left_click", "coordinate": [500, 500]}, "pyautogui.click(540, 540)")
    assert find_space([square], (1088, 1088)) == "model_pixels"


def test_a_drag_is_drawn_with_both_ends_and_leaves_the_pointer_at_the_second() -> None:
    action = {"action": "left_click_drag", "start_coordinate": [10, 20], "end_coordinate": [300, 400]}
    drawn = draw_step(action, None, image=IMAGE, space="model_pixels", pointer=None)
    (mark,) = drawn.marks
    assert (mark.kind, mark.x, mark.y, mark.to_x, mark.to_y) == ("drag", 10, 20, 300, 400)
    assert drawn.pointer == (300, 400)
    assert drawn.caption == "drag from (10, 20) to (300, 400)"


def test_scroll_without_a_place_is_drawn_where_the_pointer_was_left() -> None:
    scroll = {"action": "scroll", "direction": "down", "amount": 3}
    (mark,) = draw(scroll, pointer=(70.0, 80.0))
    assert (mark.kind, mark.x, mark.y, mark.direction, mark.is_assumed) == ("scroll", 70, 80, "down", True)
    assert draw(scroll) == ()
    assert describe(scroll) == "scroll down 3"


def test_sequence_is_numbered_in_its_order() -> None:
    action = {
        "action": "sequence",
        "actions": [
            {"action": "mouse_move", "coordinate": [5, 6]},
            {"action": "type", "text": "x"},
            {"action": "left_click", "coordinate": [50, 60]},
        ],
    }
    drawn = draw_step(action, None, image=IMAGE, space="model_pixels", pointer=None)
    assert [(mark.number, mark.x) for mark in drawn.marks] == [(1, 5), (3, 50)]
    assert drawn.caption == 'move to (5, 6); then type "x"; then click at (50, 60)'


def test_a_place_outside_the_image_is_drawn_at_its_edge_and_marked_as_outside() -> None:
    (mark,) = draw({"action": "left_click", "coordinate": [99_999, -5]})
    assert (mark.x, mark.y, mark.is_outside) == (1280, 0, True)


def test_an_imported_step_without_an_action_is_drawn_from_its_command() -> None:
    drawn = draw_step(None, "pyautogui.click(x=100, y=200)\ntime.sleep(1)", image=IMAGE, space="unit", pointer=None)
    assert [(mark.x, mark.y) for mark in drawn.marks] == [(100, 200)]
    assert drawn.caption == "click at (100, 200); then wait 1 s"


@pytest.mark.parametrize(
    ("action", "caption"),
    [
        ({"action": "type", "text": 'say "a"\n'}, 'type "say \\"a\\"\\n"'),
        ({"action": "key", "keys": ["ctrl", "s"]}, "press ctrl + s"),
        ({"action": "double_click", "coordinate": [1, 2]}, "double click at (1, 2)"),
        ({"action": "left_click"}, "click at the pointer"),
        ({"action": "wait"}, "wait"),
        ({"action": "terminate", "status": "failure"}, "says that the task cannot be done"),
        ({"action": "terminate", "status": "success"}, "says that the task is done"),
        ({"action": "terminate", "status": ["?"]}, "end the task"),
        ({"action": "left_click", "coordinate": [0.5, 0.25]}, "click at (0.5, 0.25)"),
    ],
)
def test_caption_says_what_was_done(action: dict[str, Any], caption: str) -> None:
    assert describe(action) == caption


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=12), inner, max_size=3),
    max_leaves=6,
)
NAMES = ("left_click", "left_click_drag", "scroll", "type", "key", "sequence", "wait", "terminate", "anything")
KEYS = ("coordinate", "start_coordinate", "end_coordinate", "text", "keys", "direction", "amount", "actions", "seconds")
POINT = st.lists(st.integers(-(10**6), 10**6) | st.floats(-1e6, 1e6), min_size=2, max_size=2)


@given(
    name=st.sampled_from(NAMES),
    more=st.dictionaries(st.sampled_from(KEYS), JSON | POINT, max_size=4),
    command=st.none() | st.text(max_size=30),
)
def test_any_row_is_drawn_inside_the_image_or_not_at_all(name, more, command) -> None:
    action = read_action(json.dumps({**more, "action": name}))
    space = find_space([(action, command)], IMAGE)
    for mark in draw(action, command, space=space):
        for x, y in ((mark.x, mark.y), (mark.to_x, mark.to_y)):
            assert x is None or 0 <= x <= IMAGE[0]
            assert y is None or 0 <= y <= IMAGE[1]


@pytest.mark.parametrize("text", [None, "", "{", "[]", "3", '{"action": 3}', '{"action": "sequence"}'])
def test_text_that_is_not_an_action_is_read_as_none(text: str | None) -> None:
    assert read_action(text) is None
