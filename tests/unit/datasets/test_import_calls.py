"""Recorded code as actions: exactly what the code did, or an error that says why it cannot be expressed."""

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from osworld_pipeline.datasets.importers.calls import Pointer, actions_of, read_code
from osworld_pipeline.errors import ActionParseError


def said(code: str, pointer: Pointer | None = None) -> list[Any]:
    return [
        dict(action) for action in actions_of(read_code(code), lambda x, y: (round(x), round(y)), pointer or Pointer())
    ]


def at(action: str, x: int = 3, y: int = 4) -> dict[str, Any]:
    return {"action": action, "coordinate": [x, y]}


def key(*keys: str) -> dict[str, Any]:
    return {"action": "key", "keys": list(keys)}


@pytest.mark.parametrize(
    ("code", "actions"),
    [
        ("pyautogui.click(3, 4)", [at("left_click")]),
        ("pyautogui.click((3, 4))", [at("left_click")]),
        ("pyautogui.click(x=3, y=4, clicks=2, interval=0.1)", [at("double_click")]),
        ("pyautogui.click(3, 4, button='right')", [at("right_click")]),
        ("pyautogui.middleClick(x=3, y=4)", [at("middle_click")]),
        ("computer.tripleClick(x=3, y=4)", [at("triple_click")]),
        ("pyautogui.moveTo(3, 4, 0.5); pyautogui.click()", [at("mouse_move"), at("left_click")]),
        (
            "pyautogui.moveTo(3, 4)\npyautogui.dragTo(x=9, y=8, button='left')",
            [at("mouse_move"), {"action": "left_click_drag", "end_coordinate": [9, 8]}],
        ),
        (
            "pyautogui.scroll(-5, x=3, y=4)",
            [at("mouse_move"), {"action": "scroll", "direction": "down", "amount": 5}],
        ),
        ("pyautogui.scroll(2)", [{"action": "scroll", "direction": "up", "amount": 2}]),
        ("pyautogui.typewrite('a\\nb', interval=0.1)", [{"action": "type", "text": "a\nb"}]),
        ("pyautogui.write(message='it is # no comment')", [{"action": "type", "text": "it is # no comment"}]),
        ('pyautogui.write("""a\n    b\n# c""")', [{"action": "type", "text": "a\n    b\n# c"}]),
        ("  pyautogui.write('C:\\\\d\\d')", [{"action": "type", "text": "C:\\d\\d"}]),
        ("pyautogui.write(['a', 'enter'])", [key("a"), key("enter")]),
        ("pyautogui.press('enter', presses=2)", [key("enter"), key("enter")]),
        ("pyautogui.press(['up', 'down'])", [key("up"), key("down")]),
        ("pyautogui.hotkey('ctrl', 'c')", [key("ctrl", "c")]),
        ("pyautogui.hotkey(['ctrl', 'c'])", [key("ctrl", "c")]),
        ("pyautogui.keyDown('ctrl')\npyautogui.press('a')\npyautogui.keyUp('ctrl')", [key("ctrl", "a")]),
        ("pyautogui.keyDown('win')\npyautogui.keyUp('win')", [key("win")]),
        (
            "pyautogui.keyDown('ctrl'); pyautogui.keyDown('c'); pyautogui.keyUp('c'); pyautogui.keyUp('ctrl')",
            [key("ctrl", "c")],
        ),
        ("import pyautogui\nimport time\n# first\npyautogui.click(3, 4)\ntime.sleep(0.5)", [at("left_click")]),
        ("```python\npyautogui.click(3, 4)\n```", [at("left_click")]),
        ("time.sleep(3)", [{"action": "wait"}]),
        ("WAIT", [{"action": "wait"}]),
        ("computer.wait()", [{"action": "wait"}]),
        ("FAIL", [{"action": "terminate", "status": "failure"}]),
        ("computer.terminate(status='success')", [{"action": "terminate", "status": "success"}]),
        (
            "pyautogui.press('enter')\ncomputer.terminate(status='failure')",
            [key("enter"), {"action": "terminate", "status": "failure"}],
        ),
    ],
)
def test_code_becomes_the_actions_it_did(code: str, actions: list[Any]) -> None:
    assert said(code) == actions


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("", "no code"),
        ("x = 3", "only pyautogui calls"),
        ("os.system('ls')", "os.system is not an action"),
        ("pyautogui.click(", "not Python"),
        ("pyautogui.click()", "the position of the pointer is unknown"),
        ("pyautogui.click(1, 2, clicks=4)", "4 clicks"),
        ("pyautogui.click(1, 2, clicks=2, button='right')", "2 clicks with the right button"),
        ("pyautogui.click('a.png')", "not a point"),
        ("pyautogui.dragTo(1, 2, button='right')", "right button"),
        ("pyautogui.hscroll(3)", "hscroll is not a known action"),
        ("pyautogui.moveRel(3, 4)", "moveRel is not a known action"),
        ("pyautogui.mouseDown()", "mouseDown is not a known action"),
        ("pyautogui.scroll(0.5)", "a scroll by 0.5"),
        ("pyautogui.press('nokey')", "unknown key"),
        ("pyautogui.press('a', presses=99)", "99 times"),
        ("pyautogui.keyDown('ctrl')\npyautogui.click(1, 2)\npyautogui.keyUp('ctrl')", "while the key ctrl is held"),
        ("pyautogui.keyDown('ctrl')", "held beyond its step"),
        ("computer.terminate(status='maybe')", "success or failure"),
        ("computer.call_user()", "computer.call_user is not a known action"),
        ("computer.wait(f())", "literal arguments"),
        ("computer.click(x=1e999, y=1)", "not a point"),
        ("computer.click(x=1, y=1, clicks=1e999)", "clicks with the left button"),
        ("computer.click(x={[]: 1})", "literal arguments"),
        ("DONE\npyautogui.click(1, 2)", "after the end"),
    ],
)
def test_code_that_cannot_be_expressed_is_refused_with_its_reason(code: str, reason: str) -> None:
    with pytest.raises(ActionParseError, match=reason):
        said(code)


def test_a_click_without_a_point_is_where_an_earlier_step_left_the_pointer() -> None:
    pointer = Pointer()
    said("pyautogui.dragTo(7, 8)", pointer)
    assert said("pyautogui.doubleClick()", pointer) == [at("double_click", 7, 8)]


PIECES = (
    *("pyautogui.", "computer.", "click", "press", "keyDown", "scroll", "wait", "(", ")", "'a'", "x=", "-1", ","),
    *("1e999", "[1, 2]", "\n", ";", "DONE", "None", "0.5"),
)


@given(code=st.lists(st.sampled_from(PIECES)).map("".join) | st.text())
def test_no_code_raises_anything_but_a_refusal(code: str) -> None:
    with suppress(ActionParseError):
        assert all("action" in action for action in said(code))
