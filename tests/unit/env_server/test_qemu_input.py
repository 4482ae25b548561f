"""Input that goes around the guest agent: QEMU's emulated keys and mouse, and pyautogui programs for foreign guests."""

import ast
import json
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from env_server.foreign_input import pyautogui_program
from env_server.guest.keys import key_names
from env_server.guest_client import GuestCall, GuestClient
from env_server.providers.qemu.qmp_input import plan_input, qcodes_of
from osworld_pipeline.errors import ActionParseError, ReplicaError


def call(name: str, *args: object, **kwargs: object) -> GuestCall:
    return GuestCall(name=name, args=args, kwargs=kwargs)


def events_of(*calls: GuestCall) -> list[dict[str, Any]]:
    moments = plan_input(calls, screen_size=(1280, 720), start=(0, 0))
    return [dict(event) for moment in moments for event in moment.events]


def keys_of(*calls: GuestCall) -> list[str]:
    return [
        ("+" if event["data"]["down"] else "-") + event["data"]["key"]["data"]
        for event in events_of(*calls)
        if event["type"] == "key"
    ]


@pytest.mark.parametrize(
    ("key", "qcodes"),
    [
        ("a", ("a",)), ("A", ("shift", "a")), ("7", ("7",)), ("&", ("shift", "7")), ("<", ("shift", "comma")),
        ("_", ("shift", "minus")), ("\\", ("backslash",)), (" ", ("spc",)), ("\n", ("ret",)), ("enter", ("ret",)),
        ("Esc", ("esc",)), ("f12", ("f12",)), ("win", ("meta_l",)), ("num5", ("kp_5",)), ("pagedown", ("pgdn",)),
    ],
)  # fmt: skip
def test_a_key_name_or_character_is_translated_to_keys(key: str, qcodes: tuple[str, ...]) -> None:
    assert qcodes_of(key) == qcodes


def test_every_printable_character_has_keys() -> None:
    typed = [qcodes_of(chr(point)) for point in range(0x20, 0x7F)]
    assert len(set(typed)) == 95, "no two characters are typed alike"


def test_most_key_names_have_a_key() -> None:
    lacking = []
    for name in key_names():
        try:
            qcodes_of(name)
        except ActionParseError:
            lacking.append(name)
    assert not {"f11", "left", "tab", "altright", "numlock", "printscreen"} & set(lacking)


@pytest.mark.parametrize("key", ["é", "€", "f13", "nonsense", ""])
def test_a_key_that_a_us_keyboard_lacks_is_refused(key: str) -> None:
    with pytest.raises(ActionParseError, match="an emulated US keyboard has no key"):
        qcodes_of(key)


def test_a_chord_is_pressed_in_order_and_released_in_reverse() -> None:
    assert keys_of(call("hotkey", "ctrl", "alt", "T")) == ["+ctrl", "+alt", "+t", "-t", "-alt", "-ctrl"]


def test_shift_is_held_only_for_the_characters_that_need_it() -> None:
    assert keys_of(call("write", "aB")) == ["+a", "-a", "+shift", "+b", "-b", "-shift"]


def test_a_click_moves_first_and_points_into_the_screen() -> None:
    events = events_of(call("click", 1279, 5000, button="right"))
    assert [event["data"].get("value") for event in events[:2]] == [0x7FFF, 0x7FFF]
    assert [event["data"] for event in events[2:]] == [
        {"button": "right", "down": True},
        {"button": "right", "down": False},
    ]


def test_a_relative_move_starts_where_the_last_one_ended() -> None:
    events = events_of(call("moveTo", 100, 100), call("move", 50, -20))
    last_x, last_y = (event["data"]["value"] for event in events[-2:])
    assert (round(last_x * 1279 / 0x7FFF), round(last_y * 719 / 0x7FFF)) == (150, 80)


def test_a_sleep_is_a_pause_and_not_an_event() -> None:
    moments = plan_input([call("sleep", 0.5)], screen_size=(640, 480), start=(0, 0))
    assert [(moment.events, moment.pause_s) for moment in moments] == [((), 0.5)]


def test_a_list_with_one_bad_call_is_refused_as_a_whole() -> None:
    with pytest.raises(ActionParseError, match="no call 'exec'"):
        plan_input([call("moveTo", 1, 1), call("exec", "rm")], screen_size=(640, 480), start=(0, 0))


# Programs for foreign guests


def statements(program: str) -> list[str]:
    return program.splitlines()[1:]


def test_calls_become_a_pyautogui_program() -> None:
    program = pyautogui_program(
        [call("click", 10, 20, button="right"), call("hotkey", "ctrl", "s"), call("press", "enter"), call("sleep", 1)]
    )
    assert program.splitlines()[0] == "import pyautogui, time; pyautogui.FAILSAFE = False"
    assert statements(program) == [
        "pyautogui.click(x=10, y=20, button='right')",
        "pyautogui.hotkey('ctrl', 's')",
        "pyautogui.press(keys='enter')",
        "time.sleep(1)",
    ]


def test_less_than_is_typed_by_its_key() -> None:
    program = pyautogui_program([call("write", "a<b<", interval=0.1)])
    assert statements(program) == [
        "pyautogui.write('a', interval=0.1)",
        "pyautogui.hotkey('shift', ',')",
        "pyautogui.write('b', interval=0.1)",
        "pyautogui.hotkey('shift', ',')",
    ]


@pytest.mark.parametrize("text", ["'); import os; os.system('x') #", "\\", '"""', "{}%s", "a\nb"])
def test_any_text_stays_a_literal(text: str) -> None:
    tree = ast.parse(pyautogui_program([call("write", text)]))
    calls = [node.value for node in tree.body[2:] if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)]
    assert len(calls) == len(tree.body[2:]) == 1
    argument = calls[0].args[0]
    assert isinstance(argument, ast.Constant)
    assert argument.value == text


class Sneaky(str):
    """A string whose repr is code."""

    def __repr__(self) -> str:
        return "__import__('os').system('x')"


@pytest.mark.parametrize(
    "bad", [call("eval", "1"), call("press", Sneaky("a")), call("moveTo", object(), 1), call("press", ["a", 1])]
)
def test_anything_but_known_calls_with_literals_is_refused(bad: GuestCall) -> None:
    with pytest.raises(ActionParseError):
        pyautogui_program([bad])


class ForeignGuest:
    """A guest that has /execute and not /act."""

    def __init__(self, answer: httpx.Response) -> None:
        self.answer = answer
        self.asked: list[tuple[str, Any]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append((request.url.path, json.loads(request.content)))
        return self.answer if request.url.path == "/execute" else httpx.Response(404, text="Not Found")

    def paths(self) -> list[str]:
        return [path for path, _ in self.asked]


async def act(foreign: ForeignGuest, calls: Sequence[GuestCall], times: int = 1) -> None:
    http = httpx.AsyncClient(base_url="http://guest", transport=httpx.MockTransport(foreign))
    async with GuestClient(http, name="replica-0") as guest:
        for _ in range(times):
            await guest.act(calls)


async def test_a_foreign_guest_runs_a_program_and_its_kind_is_remembered() -> None:
    foreign = ForeignGuest(httpx.Response(200, json={"status": "success", "output": "", "error": "", "returncode": 0}))
    await act(foreign, [call("click", 1, 2)], times=2)
    assert foreign.paths() == ["/act", "/execute", "/execute"]
    command = foreign.asked[1][1]["command"]
    assert command[:2] == ["python", "-c"]
    assert "pyautogui.click(x=1, y=2)" in command[2]


@pytest.mark.parametrize(
    "answer",
    [
        httpx.Response(200, json={"status": "success", "error": "Traceback: no display", "returncode": 1}),
        httpx.Response(500, json={"status": "error", "message": "timed out"}),
    ],
)
async def test_a_program_that_fails_is_a_fault_and_is_not_run_again(answer: httpx.Response) -> None:
    foreign = ForeignGuest(answer)
    with pytest.raises(ReplicaError, match="in the middle of an action"):
        await act(foreign, [call("click", 1, 2)])
    assert foreign.paths() == ["/act", "/execute"]
