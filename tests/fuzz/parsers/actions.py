"""Parsers of a model's output: each dialect, the pyautogui language, OSGym's calls, and the code of recorded steps."""

import json
from functools import partial

from env_server.api.osgym.calls import read_osgym_action
from env_server.driving.pyautogui_calls import read_calls
from env_server.providers.qemu.qmp_input import plan_input
from fuzz.parser import Parser, text_of
from osworld_pipeline.datasets.importers.calls import Pointer, actions_of, read_code
from osworld_pipeline.dialects import GRAMMARS, load_dialect
from osworld_pipeline.dialects.commands import split_command
from osworld_pipeline.domain.pyautogui import SPECIAL_ACTIONS, parse_pyautogui
from osworld_pipeline.errors import ActionParseError

SCREEN = (1920, 1080)
ACTIONS = (
    {"action": "left_click", "coordinate": [10, 20]},
    {"action": "left_click_drag", "start_coordinate": [1, 2], "end_coordinate": [3, 4]},
    {"action": "type", "text": "ls -l\n"},
    {"action": "key", "keys": ["ctrl", "c"]},
    {"action": "scroll", "coordinate": [5, 6], "direction": "down", "amount": 3},
    {"action": "wait"},
    {"action": "terminate", "status": "success"},
)


def _read_turn(name: str, data: bytes) -> None:
    """A turn that is parsed gives a command that a desktop accepts, and its action can be formatted again."""
    dialect = load_dialect(name)
    turn = dialect.parse(text_of(data))
    if turn.arguments is None:
        raise ActionParseError(turn.error or "")
    for piece in split_command(dialect.to_command(turn.arguments, lambda x, y: (int(x), int(y)))):
        if piece not in SPECIAL_ACTIONS:
            _take(piece)
    json.dumps(turn.arguments, allow_nan=False).encode()
    try:
        written = dialect.format("again", turn.arguments)
    except ActionParseError:
        return  # a fallback reads more than the dialect can write
    assert dialect.parse(written).arguments == turn.arguments, "what is written is read differently"


def _take(text: str) -> None:
    """Reads a command as a desktop does: over the wire to a guest agent, and as input events to a virtual machine."""
    calls = read_calls(text)
    json.dumps([[call.name, call.args, dict(call.kwargs or {})] for call in calls], allow_nan=False).encode()
    plan_input(parse_pyautogui(text), screen_size=SCREEN, start=(0, 0))


def _read_osgym(data: bytes) -> None:
    action = read_osgym_action(text_of(data))
    if action.calls:
        _take(action.calls)


def _read_recorded(data: bytes) -> None:
    actions_of(read_code(text_of(data)), lambda x, y: (int(x), int(y)), Pointer())


def _turns(name: str) -> tuple[bytes, ...]:
    dialect, turns = load_dialect(name), []
    for action in ACTIONS:
        try:
            turns.append(dialect.format("Do it", action).encode())
        except ActionParseError:
            continue  # this dialect cannot express the action
    return tuple(turns)


PARSERS = [
    *(
        Parser(name=f"dialect_{name}", read=partial(_read_turn, name), refusals=(ActionParseError,), seeds=_turns(name))
        for name in GRAMMARS
    ),
    Parser(
        name="pyautogui",
        read=lambda data: _take(text_of(data)),
        refusals=(ActionParseError,),
        seeds=(
            b"pyautogui.click(10, 20)",
            b"import pyautogui\npyautogui.hotkey('ctrl', 'c'); time.sleep(1.5)",
            b"pyautogui.dragTo(x=1, y=-2, duration=0.5)",
            b"pyautogui.press(['a', 'b'], presses=2)",
        ),
    ),
    Parser(
        name="osgym_calls",
        read=_read_osgym,
        refusals=(ActionParseError,),
        seeds=(b"click(10,20)", b"type(a & b) & press(enter)", b"scroll(1,2,up)", b"drag(1,2,3,4)", b"hotkey(ctrl,c)"),
    ),
    Parser(
        name="recorded_code",
        read=_read_recorded,
        refusals=(ActionParseError,),
        seeds=(
            b"pyautogui.click(x=0.5, y=0.25)",
            b"computer.tripleClick(1, 2)",
            b"```python\ntime.sleep(2)\n```",
            b"pyautogui.keyDown('shift')\npyautogui.press('a')\npyautogui.keyUp('shift')",
        ),
    ),
]
