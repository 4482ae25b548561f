"""The calls that /act accepts and the input that they become; the keyboard's names and characters."""

import string
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from env_server.guest.calls import CALL_NAMES, bind_call, perform_calls
from env_server.guest.keys import key_names, keysym_of_char, keysym_of_key


class RecordingDevice:
    """Records the requested input; its pointer is where it was last moved."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.at = (10, 20)

    def position(self) -> tuple[int, int]:
        return self.at

    def move(self, x: float | None, y: float | None, *, duration_s: float = 0.0) -> None:
        self.at = (int(self.at[0] if x is None else x), int(self.at[1] if y is None else y))
        self.log.append(("move", *self.at))

    def click(self, name: str | int, *, clicks: int = 1, interval_s: float = 0.0) -> None:
        self.log.append(("click", name, clicks))

    def button(self, name: str | int, *, down: bool) -> None:
        self.log.append(("button", name, down))

    def drag(self, x: float, y: float, name: str | int, *, duration_s: float = 0.0) -> None:
        self.log.append(("drag", x, y, name))

    def wheel(self, clicks: int, *, horizontal: bool = False) -> None:
        self.log.append(("wheel", clicks, horizontal))

    def key(self, name: str, *, down: bool) -> None:
        self.log.append(("key", name, down))

    def press(self, names: list[str], *, presses: int = 1, interval_s: float = 0.0) -> None:
        self.log.append(("press", tuple(names), presses))

    def hotkey(self, names: list[str], *, interval_s: float = 0.0) -> None:
        self.log.append(("hotkey", tuple(names)))

    def write(self, text: str, *, interval_s: float = 0.0) -> None:
        self.log.append(("write", text))


def performed(name: str, *args: object, **kwargs: object) -> list[tuple[Any, ...]]:
    device = RecordingDevice()
    perform_calls(device, [{"name": name, "args": list(args), "kwargs": kwargs}])
    return device.log


def test_click_moves_first_and_presses_the_named_button() -> None:
    assert performed("click", 5, 6) == [("move", 5, 6), ("click", "left", 1)]
    assert performed("click", x=5, y=6, clicks=2, button="right") == [("move", 5, 6), ("click", "right", 2)]
    assert performed("click", (5, 6)) == [("move", 5, 6), ("click", "left", 1)]
    assert performed("click") == [("click", "left", 1)]
    assert performed("rightClick", 1, 2) == [("move", 1, 2), ("click", "right", 1)]
    assert performed("doubleClick") == [("click", "left", 2)]
    assert performed("tripleClick") == [("click", "left", 3)]


def test_moves_and_drags_are_absolute_or_relative_by_name() -> None:
    assert performed("moveTo", 7, 8) == [("move", 7, 8)]
    assert performed("moveRel", 7, -8) == [("move", 17, 12)]
    assert performed("dragTo", 7, 8, 0.5, button="left") == [("drag", 7, 8, "left")]
    assert performed("dragRel", 7, 8) == [("drag", 17, 28, "left")]
    assert performed("dragTo", 7, 8, 0.5, "right", mouseDownUp=True) == [("drag", 7, 8, "right")]
    assert performed("dragTo", 7, 8, mouseDownUp=False) == [("move", 7, 8)]
    assert performed("mouseDown", button="middle") == [("button", "middle", True)]


def test_wheel_keys_and_text_arrive_as_given() -> None:
    assert performed("scroll", -3) == [("wheel", -3, False)]
    assert performed("hscroll", 3, 1, 2) == [("move", 1, 2), ("wheel", 3, True)]
    assert performed("write", "a<b>\n") == [("write", "a<b>\n")]
    assert performed("typewrite", ["a", "enter"]) == [("press", ("a", "enter"), 1)]
    assert performed("press", "enter", presses=3) == [("press", ("enter",), 3)]
    assert performed("hotkey", "ctrl", "alt", "t") == [("hotkey", ("ctrl", "alt", "t"))]
    assert performed("keyDown", "shift") == [("key", "shift", True)]


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        ("click", "a call must be"),
        ({"name": "exec", "args": []}, "no call 'exec'"),
        ({"name": "click", "args": ["1", 2]}, "must be a number"),
        ({"name": "click", "args": [1, True]}, "must be a number"),
        ({"name": "click", "args": [1, 2], "kwargs": {"x": 3}}, "'x' twice"),
        ({"name": "click", "kwargs": {"button": "fourth"}}, "button must be"),
        ({"name": "click", "kwargs": {"clicks": 5000}}, "at most 1000"),
        ({"name": "dragTo", "args": [1]}, "lacks y"),
        ({"name": "moveTo", "args": [float("nan"), 1]}, "must be a number"),
        ({"name": "press", "args": ["nokey"]}, "no key is called 'nokey'"),
        ({"name": "hotkey", "args": []}, "lacks keys"),
        ({"name": "write", "args": ["\x00"]}, r"U\+0000"),
        ({"name": "write", "args": [5]}, "must be a string"),
        ({"name": "sleep", "args": [3600]}, "0 to 60"),
        ({"name": "write", "args": ["a", 0, 0]}, "at most 2 arguments"),
    ],
)
def test_a_malformed_call_is_refused_with_a_reason(call: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        bind_call(call)


def test_nothing_happens_when_one_call_of_a_list_is_refused() -> None:
    device = RecordingDevice()
    with pytest.raises(ValueError, match="no call"):
        perform_calls(device, [{"name": "click", "args": [1, 2]}, {"name": "system", "args": ["reboot"]}])
    assert device.log == []


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=6,
)


@given(
    name=st.sampled_from(CALL_NAMES),
    args=st.lists(_JSON, max_size=5),
    kwargs=st.dictionaries(st.sampled_from(["x", "y", "button", "interval", "keys"]), _JSON, max_size=3),
)
def test_any_json_is_either_bound_or_refused(name: str, args: list[Any], kwargs: dict[str, Any]) -> None:
    try:
        found, bound = bind_call({"name": name, "args": args, "kwargs": kwargs})
    except ValueError:
        return
    assert found == name
    assert isinstance(bound, dict)


def test_every_printable_character_has_the_keysym_of_its_code() -> None:
    for char in string.printable[:95]:
        assert keysym_of_char(char) == ord(char)
    assert keysym_of_char("\n") == 0xFF0D
    assert keysym_of_char("\t") == 0xFF09
    assert keysym_of_char("é") == 0xE9
    assert keysym_of_char("€") == 0x010020AC
    assert keysym_of_char("😀") == 0x0101F600


@given(st.characters(min_codepoint=0xA0, exclude_categories=["Cs"]))
def test_different_characters_have_different_keysyms(char: str) -> None:
    assert keysym_of_char(char) & 0xFFFFFF == ord(char)


def test_key_names_are_those_of_pyautogui() -> None:
    assert keysym_of_key("enter") == keysym_of_key("RETURN") == 0xFF0D
    assert (keysym_of_key("f1"), keysym_of_key("f12"), keysym_of_key("num5")) == (0xFFBE, 0xFFC9, 0xFFB5)
    assert keysym_of_key("<") == 0x3C
    assert {"ctrl", "alt", "shift", "win", "esc", "pagedown", "backspace", "delete", "space"} <= set(key_names())
