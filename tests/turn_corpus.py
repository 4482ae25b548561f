"""Plausible assistant turns: every action in every format of Slime-OSWorld, whole and a little damaged."""

import json
from collections.abc import Iterator

ACTIONS = (
    {"action": "left_click", "coordinate": [10, 20]},
    {"action": "right_click", "coordinate": [10, 20]},
    {"action": "double_click", "coordinate": [1919, 1079]},
    {"action": "left_click_drag", "end_coordinate": [30, 40]},
    {"action": "type", "text": 'say "hi"\n'},
    {"action": "type", "text": "naïve — 你好"},
    {"action": "key", "keys": ["ctrl", "s"]},
    {"action": "key", "keys": ["enter"]},
    {"action": "key", "keys": ["Return"]},
    {"action": "scroll", "direction": "down"},
    {"action": "scroll", "direction": "up", "amount": 5},
    {"action": "wait"},
    {"action": "terminate", "status": "success"},
    {"action": "terminate", "status": "failure"},
)
CALLS = (
    "pyautogui.click(10, 20)",
    "pyautogui.rightClick(10, 20)",
    "pyautogui.doubleClick(10, 20)",
    "pyautogui.dragTo(30, 40)",
    'pyautogui.write("a (b) c")',
    "pyautogui.typewrite('x')",
    'pyautogui.press("enter")',
    'pyautogui.hotkey("ctrl", "s")',
    "pyautogui.scroll(-3)",
)
UNKNOWN = (
    {"action": "ponder"},
    {"action": "fly", "to": [1, 2]},
    {"action": ""},
)
DESCRIPTIONS = ("Save the file.", "", "Open it — “now”.")


def well_formed() -> Iterator[str]:
    """Turns in a format that Slime-OSWorld lists."""
    for description in DESCRIPTIONS:
        for action in ACTIONS:
            call = json.dumps({"name": "computer_use", "arguments": action}, ensure_ascii=False)
            yield f"Action: {description}\n<tool_call>{call}</tool_call>"
            yield f"Action: {description}\n<tool_call>\n{call}\n</tool_call><|im_end|>"
            yield f"```\nAction: {description}\n<tool_call>{json.dumps(action)}</tool_call>\n```"
            yield f"Action: {description}\n{call}"
            yield json.dumps(action)
        for call in CALLS:
            yield f"Action: {description}\n<answer>{call}</answer>"
            yield f"<action>{call}</action></s>"
            yield f"Action: {description}\n```python\n{call}\n```"
            yield f"I will do it: {call} and look."
            yield call
    for word in ("WAIT", "DONE", "FAIL"):
        yield word
        yield f"<answer>{word}</answer>"
        yield f"<tool_call>{word}</tool_call>"


def lenient() -> Iterator[str]:
    """Turns that only a fallback can read."""
    yield from ("I wait a little.", "click [10, 20]", "double click at [3, 4]", "right click [3, 4]")
    yield from ('I type "hello" there', "scroll down a bit", "scroll up")
    for action in ACTIONS[:4]:
        yield f"Action: click it\n<tool_call>{json.dumps({'name': 'computer_use', 'arguments': action})[:-1]}"


def no_action() -> Iterator[str]:
    """Turns whose action is unknown and that no fallback can save."""
    for action in UNKNOWN:
        call = json.dumps({"name": "computer_use", "arguments": action})
        yield f"Action: Think about it.\n<tool_call>{call}</tool_call>"
        yield call
    yield from ("", "I do not know.", "Action: Look around.", "<tool_call></tool_call>", "<tool_call>{}</tool_call>")


def damaged() -> Iterator[str]:
    """Each well-formed turn with a cut, a dropped character, or noise around it."""
    for index, turn in enumerate(well_formed()):
        cut = 1 + index * 7 % max(len(turn), 1)
        yield turn[:cut]
        yield turn[:cut] + turn[cut + 1 :]
        yield f"noise {turn} noise"
        yield turn.upper()
        yield turn.replace('"', "'")
