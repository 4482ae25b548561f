"""Slime-OSWorld's dialect: an `Action:` line, then one `computer_use` tool call as JSON between `<tool_call>` tags.

Reading goes from strict to lenient: tags, JSON, a bare action object, WAIT/DONE/FAIL, a pyautogui call in noise, and
only then the fallback, whose result is marked.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from osworld_pipeline.agent.dialects.base import CoordinateSpace, ParsedTurn, ScalePoint
from osworld_pipeline.agent.dialects.slime_actions import action_from_call, normalise_action, to_command
from osworld_pipeline.agent.dialects.slime_fallback import guess_action
from osworld_pipeline.agent.prompts import slime_system_prompt
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
# What the reader strips or cuts at must not stand unescaped inside a JSON string that we write.
_ESCAPED = re.compile(r"<(?=\||/?(?:tool_call|answer|action|s)>)|`")
_DECODER = json.JSONDecoder(strict=False)


class SlimeDialect:
    name = "slime"
    stop: tuple[str, ...] = ("</tool_call>",)
    coordinate_space: CoordinateSpace = "model_pixels"

    def system_prompt(self, kind: str) -> str:
        """`kind`: full or short."""
        return slime_system_prompt(kind)

    def parse(self, text: str) -> ParsedTurn:
        match = _DESCRIPTION.search(text)
        description = match.group(1).split("<tool_call>")[0].strip() if match else ""
        error = "no action found in the response"
        for reader in (_read_tagged, _read_bare):
            try:
                arguments = reader(text)
            except ActionParseError as problem:
                error = str(problem)
                continue
            if arguments is not None:
                return _turn(description, arguments)
        guessed = guess_action(_ARTEFACTS.sub("", text))
        if guessed is not None:
            return _turn(description, guessed, fallback_used=True)
        return ParsedTurn(description=description, arguments=None, action_type="unknown", command=None, error=error)

    def parse_strict(self, text: str) -> ParsedTurn:
        turn = self.parse(text)
        if turn.arguments is None:
            raise ActionParseError(f"no action could be read: {turn.error}; the turn begins {text[:60]!r}")
        return turn

    def format(self, description: str, arguments: Mapping[str, Any]) -> str:
        action = normalise_action(arguments)
        call = {"name": "computer_use", "arguments": action}
        body = json.dumps(call, ensure_ascii=False, separators=(",", ":"))
        body = _ESCAPED.sub(lambda match: f"\\u{ord(match.group()):04x}", body)
        line = " ".join(re.sub(r"[<>`]", "", description).split())
        return f"Action: {line}\n<tool_call>{body}</tool_call>"

    def to_command(self, arguments: Mapping[str, Any], scale: ScalePoint | None = None) -> str:
        return to_command(arguments, scale)


def _turn(description: str, arguments: dict[str, Any], *, fallback_used: bool = False) -> ParsedTurn:
    return ParsedTurn(
        description=description,
        arguments=arguments,
        action_type=arguments["action"],
        command=to_command(arguments),
        fallback_used=fallback_used,
    )


def _read_tagged(text: str) -> dict[str, Any] | None:
    """The first tagged action; None where there is no tag. A tag around nonsense is an error, not a reason to go on
    to another tag."""
    for opening, closing in _TAGS:
        start = opening.search(text)
        if start is None:
            continue
        rest = text[start.end() :]
        # A string inside the JSON may hold a closing tag, so the JSON itself says where it ends.
        action = _json_action(rest.lstrip())
        if action is None:
            body = _ARTEFACTS.sub("", closing.split(rest, maxsplit=1)[0]).strip()
            action = _json_action(body) or _SPECIAL.get(body) or _call_action(body)
        if action is None:
            raise ActionParseError("the tool call is not a JSON object with an action")
        return dict(action)
    return None


def _read_bare(text: str) -> dict[str, Any] | None:
    cleaned = _ARTEFACTS.sub("", text)
    if any(opening.search(cleaned) for opening, _ in _TAGS):
        return None
    for candidate in _objects(cleaned):
        action = _json_action(candidate)
        if action is not None:
            return action
    special = _SPECIAL_LINE.search(cleaned)
    if special:
        return dict(_SPECIAL[special.group(1)])
    return _call_action(cleaned)


def _objects(text: str) -> Iterator[str]:
    """The text from each opening brace on; at most 32, because noise may be all braces."""
    for count, match in enumerate(re.finditer(r"\{", text)):
        if count == 32:
            return
        yield text[match.start() :]


def _json_action(text: str) -> dict[str, Any] | None:
    """The action of a JSON object that begins `text`; None where none does.

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
        return normalise_action(arguments)
    return normalise_action(value) if "action" in value else None


def _call_action(text: str) -> dict[str, Any] | None:
    """The first pyautogui call in `text`, its parentheses balanced outside string literals."""
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
                return action_from_call(text[start : index + 1])
        index += 1
    raise ActionParseError("the pyautogui call is never closed")
