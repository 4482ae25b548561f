"""Slime-OSWorld's dialect: an `Action:` line, then one `computer_use` tool call as JSON between `<tool_call>` tags.

Parsing goes from strict to lenient: tags, JSON, a bare action object, WAIT/DONE/FAIL, a pyautogui call in other text,
and finally the fallback, whose result is marked.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

from osworld_pipeline.dialects.actions import Arguments
from osworld_pipeline.dialects.base import Grammar, Reading
from osworld_pipeline.dialects.coordinates import CoordinateSpace
from osworld_pipeline.dialects.slime_actions import SLIME_VOCABULARY, action_from_call, normalise_action
from osworld_pipeline.dialects.slime_fallback import guess_action
from osworld_pipeline.errors import ActionParseError

_ARTEFACTS = re.compile(r"<\|im_end\|>|<\|endoftext\|>|</s>|```[a-zA-Z]*")
_TAGS = tuple((re.compile(rf"<{tag}>"), re.compile(rf"</{tag}>")) for tag in ("tool_call", "answer", "action"))
_DESCRIPTION = re.compile(r"^\s*Action:[ \t]*(.*)$", re.MULTILINE)
_SPECIAL = {
    "WAIT": {"action": "wait"},
    "DONE": {"action": "terminate", "status": "success"},
    "FAIL": {"action": "terminate", "status": "failure"},
}
_SPECIAL_LINE = re.compile(r"^\s*(?:Action:\s*)?(WAIT|DONE|FAIL)[.\s]*$", re.MULTILINE)
# Characters that the parser strips or cuts at must be escaped inside a JSON string that we write.
_ESCAPED = re.compile(r"<(?=\||/?(?:tool_call|answer|action|s)>)|`")
_DECODER = json.JSONDecoder(strict=False)


def describe(text: str) -> str:
    """The text of the `Action:` line."""
    match = _DESCRIPTION.search(text)
    return match.group(1).split("<tool_call>")[0].strip() if match else ""


def read(text: str, space: CoordinateSpace) -> Reading:
    problem = ActionParseError("no action found in the response")
    for reader in (_read_tagged, _read_bare):
        try:
            action = reader(text, space)
        except ActionParseError as error:
            problem = error
            continue
        if action is not None:
            return Reading(raw=action)
    guessed = guess_action(_ARTEFACTS.sub("", text), space)
    if guessed is None:
        raise problem
    return Reading(raw=guessed, fallback_used=True)


def write(description: str, action: Arguments) -> str:
    call = {"name": "computer_use", "arguments": action}
    body = json.dumps(call, ensure_ascii=False, separators=(",", ":"))
    body = _ESCAPED.sub(lambda match: f"\\u{ord(match.group()):04x}", body)
    line = " ".join(re.sub(r"[<>`]", "", description).split())
    return f"Action: {line}\n<tool_call>{body}</tool_call>"


def _read_tagged(text: str, space: CoordinateSpace) -> dict[str, Any] | None:
    """The first tagged action; None without a tag. An invalid tagged action is an error; later tags are not tried."""
    for opening, closing in _TAGS:
        start = opening.search(text)
        if start is None:
            continue
        rest = text[start.end() :]
        # A string inside the JSON may contain a closing tag, so the JSON itself determines its end.
        action = _json_action(rest.lstrip(), space)
        if action is None:
            body = _ARTEFACTS.sub("", closing.split(rest, maxsplit=1)[0]).strip()
            action = _json_action(body, space) or _SPECIAL.get(body) or _call_action(body, space)
        if action is None:
            raise ActionParseError("the tool call is not a JSON object with an action")
        return dict(action)
    return None


def _read_bare(text: str, space: CoordinateSpace) -> dict[str, Any] | None:
    cleaned = _ARTEFACTS.sub("", text)
    if any(opening.search(cleaned) for opening, _ in _TAGS):
        return None
    for candidate in _objects(cleaned):
        action = _json_action(candidate, space)
        if action is not None:
            return action
    special = _SPECIAL_LINE.search(cleaned)
    if special:
        return dict(_SPECIAL[special.group(1)])
    return _call_action(cleaned, space)


def _objects(text: str) -> Iterator[str]:
    """The text from each opening brace on; at most 32, because the text may consist of braces."""
    for count, match in enumerate(re.finditer(r"\{", text)):
        if count == 32:
            return
        yield text[match.start() :]


def _json_action(text: str, space: CoordinateSpace) -> dict[str, Any] | None:
    """The action of a JSON object at the start of `text`; None if there is none.

    Raises:
        ActionParseError: a tool call whose action is unknown or malformed.
    """
    try:
        value, _ = _DECODER.raw_decode(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    arguments = value.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = _DECODER.decode(arguments)
        except (ValueError, RecursionError):
            return None
    if isinstance(arguments, dict):
        return normalise_action(arguments, space)
    return normalise_action(value, space) if "action" in value else None


def _call_action(text: str, space: CoordinateSpace) -> dict[str, Any] | None:
    """The first pyautogui call in `text`, with balanced parentheses outside string literals."""
    start = text.find("pyautogui.")
    if start < 0:
        return None
    depth, quote, index = 0, "", start
    while index < len(text):
        char = text[index]
        if quote:
            if char == "\\":
                index += 1
            elif char == quote:
                quote = ""
        elif char in "\"'":
            quote = char
        elif char == "(":
            depth += 1
        elif char == ")":
            depth -= 1
            if depth <= 0:
                return action_from_call(text[start : index + 1], space)
        index += 1
    raise ActionParseError("the pyautogui call is never closed")


_PROMPT = """You operate a computer for the user. You see its screen as a screenshot, sometimes with its \
accessibility tree and the text of a terminal, and you act with mouse and keyboard.

Answer each observation with exactly one action, in this form:
Action: <what you do, in one short sentence>
<tool_call>{"name":"computer_use","arguments":{"action":...}}</tool_call>

The actions and their arguments:
- {"action":"left_click","coordinate":[x,y]}, also "right_click", "middle_click", "double_click" and "triple_click"
- {"action":"mouse_move","coordinate":[x,y]}: before a drag, or to scroll at that place
- {"action":"left_click_drag","end_coordinate":[x,y]}: drag from where the pointer is
- {"action":"type","text":"..."}: \\n presses Enter
- {"action":"key","keys":["ctrl","s"]}: one key, or several held together
- {"action":"scroll","direction":"up" or "down","amount":3}
- {"action":"wait"}: when the screen needs time
- {"action":"terminate","status":"success" or "failure"}: when the task is done, or cannot be done

Rules:
- <coordinates> Aim at the middle of a target.
- Look at the last observation before you act: if an action changed nothing, try another way.
- Prefer the keyboard where it is surer than the mouse.
- Check the result on the screen before you terminate with success. If the task cannot be done, say failure.
- No text after the tool call."""

_PROMPTS = (_PROMPT, "You operate a computer. Answer with one Action line and one tool call.<coordinates>")

SLIME = Grammar(
    name="slime",
    stop=("</tool_call>",),
    coordinate_space="model_pixels",
    vocabulary=SLIME_VOCABULARY,
    prompts=_PROMPTS,
    describe=describe,
    read=read,
    write=write,
)
