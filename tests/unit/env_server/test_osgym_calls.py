"""OSGym's action calls, read into pyautogui calls: what each means, and that nothing else is read."""

import re
import time
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from env_server.api.osgym.calls import CALL_NAMES, OsgymAction, read_osgym_action
from env_server.driving.pyautogui_calls import read_calls
from osworld_pipeline.errors import ActionParseError


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("click(100,200)", ["pyautogui.click(100, 200)"]),
        (" click( 100 , 200 ) ", ["pyautogui.click(100, 200)"]),
        ("left_double(1,2)", ["pyautogui.doubleClick(1, 2)"]),
        ("right_single(1,2)", ["pyautogui.rightClick(1, 2)"]),
        ("move(1,2)", ["pyautogui.moveTo(1, 2)"]),
        ("drag(1,2,3,4)", ["pyautogui.moveTo(1, 2)", "pyautogui.dragTo(3, 4, duration=0.5, button='left')"]),
        ("scroll(1,2,up)", ["pyautogui.moveTo(1, 2)", "pyautogui.scroll(50)"]),
        ("scroll(1,2, down )", ["pyautogui.moveTo(1, 2)", "pyautogui.scroll(-50)"]),
        ("scroll(1,2,-7)", ["pyautogui.moveTo(1, 2)", "pyautogui.scroll(-7)"]),
        ("hotkey(ctrl, shift,t)", ["pyautogui.hotkey('ctrl', 'shift', 't')"]),
        ("press(enter)", ["pyautogui.press('enter')"]),
        ("press( )", ["pyautogui.press(' ')"]),
        ("press(,)", ["pyautogui.press(',')"]),
        ("click(1,2) & wait() & click(3,4)", ["pyautogui.click(1, 2)", "time.sleep(2)", "pyautogui.click(3, 4)"]),
        ("click(1,2)&wait()", ["pyautogui.click(1, 2)", "time.sleep(2)"]),
    ],
)
def test_each_call_means_what_osgym_does(text: str, calls: list[str]) -> None:
    assert read_osgym_action(text) == OsgymAction(calls="\n".join(calls))
    read_calls(read_osgym_action(text).calls)


@pytest.mark.parametrize(("text", "ending"), [("wait()", "WAIT"), ("call_user()", "FAIL"), (" finish( ) ", "DONE")])
def test_calls_without_input_are_the_special_actions(text: str, ending: str) -> None:
    action = read_osgym_action(text)
    assert (action.calls, action.ending, action.is_final) == ("", ending, ending != "WAIT")


def test_finish_may_stand_at_the_end_of_joined_calls() -> None:
    assert read_osgym_action("press(enter)&finish()") == OsgymAction(calls="pyautogui.press('enter')", ending="DONE")


@pytest.mark.parametrize(
    "typed",
    [
        "hello", "a, b, c", "a & b", "a&b()", "f(x)", "f(x) & g(y)", "((", "))", ") & ", " both ends ", "two\nlines\n",
        "'quoted' \"twice\"", "C:\\new\\table", "100% \u20ac\u00e4\u00f6 \U0001f600", "", "&",
    ],
)  # fmt: skip
def test_typed_text_arrives_exactly(typed: str) -> None:
    (call,) = read_calls(read_osgym_action(f"type({typed})").calls)
    assert (call.name, call.args) == ("write", (typed,))


@given(st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=40))
def test_any_typed_text_arrives_exactly_unless_it_looks_like_the_next_call(typed: str) -> None:
    if re.search(rf"\)\s*&\s*({'|'.join(CALL_NAMES)})\(", typed):
        return
    (call,) = read_calls(read_osgym_action(f"type({typed})").calls)
    assert call.args == (typed,)


def test_ampersand_after_typed_text_joins_calls_only_if_the_rest_can_be_parsed() -> None:
    joined = read_osgym_action("type(a & b)&hotkey(ctrl,s)&type(c)").calls
    assert joined == "pyautogui.write('a & b')\npyautogui.hotkey('ctrl', 's')\npyautogui.write('c')"
    assert read_osgym_action("type(f()&click(1,2))").calls == "pyautogui.write('f()&click(1,2)')"


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "click", "click()", "click(1)", "click(1,2,3)", "click(a,b)", "click(1.5,2)", "click(1,9999999)",
        "drag(1,2,3)", "scroll(1,2)", "scroll(up)", "scroll(1,2,sideways)", "hotkey()", "hotkey(ctrl,,)", "press()",
        "wait(1)", "finish(now)", "finish()&click(1,2)", "call_user()&wait()", "click(1,2)&", "&click(1,2)",
        "click(1,2)&fly(3)", "click(1,2);click(3,4)", "fly(1,2)", "CLICK(1,2)", "click(1,2) extra",
        "import os", "pyautogui.click(1, 2)", "__import__('os').system('x')", "click(\u0661,\u0662)",
    ],
)  # fmt: skip
def test_any_other_text_is_refused_with_one_clear_error(text: str) -> None:
    with pytest.raises(ActionParseError, match=r"\w+ \w+"):
        read_osgym_action(text)


@pytest.mark.parametrize("text", ["press(ente)", "hotkey(ctrl,'c')", "hotkey(ctrl\n)exec(,a)", "type(\x01)"])
def test_unknown_keys_are_refused_before_any_key_is_pressed(text: str) -> None:
    with pytest.raises(ActionParseError):
        read_calls(read_osgym_action(text).calls)


@pytest.mark.parametrize(
    "text", ["type(" + ")&click(" * 8000 + ")", "click(1,1)" + "&click(1,1)" * 5000, "type(" + ") " * 30000 + "x"]
)
def test_long_hostile_text_is_read_quickly(text: str) -> None:
    start = time.thread_time()
    with suppress(ActionParseError):
        read_osgym_action(text)
    assert time.thread_time() - start < 1.0
