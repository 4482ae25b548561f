"""AReaL's dialect: a short plan, then one fenced block of pyautogui calls, or a line with DONE, FAIL or WAIT.

The last non-empty block is the action, with any tag and even without a closing fence. Code takes precedence over such a
line, but a DONE or FAIL after the code ends the task once the code has run.
"""

import re

from osworld_pipeline.dialects.actions import ACTION_NAMES, SEQUENCE, Arguments, Vocabulary, actions_in
from osworld_pipeline.dialects.base import Grammar, Reading
from osworld_pipeline.dialects.commands import to_command
from osworld_pipeline.dialects.coordinates import CoordinateSpace
from osworld_pipeline.dialects.pyautogui_calls import actions_of
from osworld_pipeline.domain.pyautogui import parse_pyautogui
from osworld_pipeline.errors import ActionParseError

MAX_DESCRIPTION_CHARS = 400
_ARTEFACTS = re.compile(r"(?:<\|im_end\|>|<\|endoftext\|>|</s>)\s*\Z")
_FENCE = re.compile(r"```")
_TAG = re.compile(r"(?!(?:DONE|FAIL|WAIT)\b)[\w+-]*[ \t]*(?=\n|\Z)|(?:python3?|py|bash|sh|shell)\s+", re.IGNORECASE)
"""Text after an opening fence that is not code: a word alone on its line, or a known tag before code on the same
line."""
_WORD = re.compile(r"^(?:[^\w\n]|_)*(DONE|FAIL|WAIT)(?:[^\w\n]|_)*$", re.IGNORECASE | re.MULTILINE)
"""Alone on its line, with any surrounding marks."""
_SPECIAL = {
    "WAIT": {"action": "wait"},
    "DONE": {"action": "terminate", "status": "success"},
    "FAIL": {"action": "terminate", "status": "failure"},
}


def describe(text: str) -> str:
    """The plan before the code, on one line."""
    plan = _WORD.sub("", text.split("```", 1)[0])
    return " ".join(plan.split())[:MAX_DESCRIPTION_CHARS]


def read(text: str, space: CoordinateSpace) -> Reading:
    # Artefacts are removed only at the end: typed text may look like one.
    block, after = _last_block(_ARTEFACTS.sub("", text))
    words = [match[1].upper() for match in _WORD.finditer(block)]
    code = _WORD.sub("", block)
    actions = actions_of(parse_pyautogui(code)) if code.strip() else []
    words += [match[1].upper() for match in _WORD.finditer(after)]
    if not actions:
        if not words:
            raise ActionParseError("no block of pyautogui calls and no DONE, FAIL or WAIT in the response")
        return Reading(raw=_SPECIAL[words[-1]])
    # Code takes precedence over a keyword; a DONE or FAIL applies once the code has run.
    ending = [_SPECIAL[words[-1]]] if words and words[-1] != "WAIT" else []
    return Reading(raw={"action": SEQUENCE, "actions": [*actions, *ending]})


def write(description: str, action: Arguments) -> str:
    plan = _WORD.sub("", description.replace("`", ""))
    *_, last = actions_in(action)
    before = f"{plan}\n" if plan else ""
    if action["action"] == "terminate" or (action["action"] == "wait" and "seconds" not in action):
        return f"{before}{to_command(action)}"
    command = to_command(action)
    if last["action"] == "terminate":
        code, _, word = command.rpartition("\n")
        return f"{before}```python\n{code}\n```\n{word}"
    return f"{before}```python\n{command}\n```"


def _last_block(text: str) -> tuple[str, str]:
    """The last non-empty fenced block, and the text after it; without a block an empty string and the whole text."""
    block, after = "", text
    position = 0
    while (opening := _FENCE.search(text, position)) is not None:
        start = opening.end()
        tag = _TAG.match(text, start)
        start = tag.end() if tag else start
        end = _closing(text, start)
        body = text[start : end if end >= 0 else len(text)]
        position = end + 3 if end >= 0 else len(text)
        if body.strip():
            block, after = body, text[position:]
    return block, after


def _closing(text: str, start: int) -> int:
    """The end of the block: a fence on the first line of its code, else the first fence at the start of a later line;
    -1 if there is none."""
    line = re.compile(r"^[ \t]*```", re.MULTILINE).search(text, start)
    newline = text.find("\n", start)
    same_line = text.find("```", start, newline if newline >= 0 else len(text))
    if same_line >= 0:
        return same_line
    return text.index("```", line.start()) if line else -1


_PROMPT = """You operate a computer for the user by writing Python calls of pyautogui. Each turn shows you its \
screen as a screenshot, sometimes with its accessibility tree and the text of a terminal; the first one says the task.

Answer each observation with a short plan and then exactly one fenced block:
```python
pyautogui.click(200, 120)
pyautogui.write("hello")
```

Rules:
- <coordinates> Aim at the middle of a target.
- Only calls with literal arguments run: click, rightClick, middleClick, doubleClick, tripleClick, moveTo, dragTo, \
mouseDown, mouseUp, scroll, hscroll, write, press, hotkey, keyDown, keyUp, and time.sleep(seconds). No variables, \
loops or imports of anything else.
- Put few calls in one block: you see the screen again only when all of them have run.
- When the screen only needs time, answer with a line that says WAIT and no block.
- When the task is done, check the screen and answer with a line that says DONE and no block. If it cannot be done, \
answer with a line that says FAIL."""
_PROMPTS = (
    _PROMPT,
    "You operate a computer. Answer with one block of pyautogui calls, or DONE or FAIL.<coordinates>",
)

PYAUTOGUI = Grammar(
    name="pyautogui",
    stop=(),
    coordinate_space="model_pixels",
    vocabulary=Vocabulary(names=frozenset(ACTION_NAMES), takes_sequences=True, clicks_at_pointer=True),
    prompts=_PROMPTS,
    describe=describe,
    read=read,
    write=write,
)
