"""The dialect of the Windows example: a thought, then one tag: `<action>sendkey ctrl-s</action>`, `type`, `typeline`,
`wait`, or `<done/>`. The example uses only the keyboard; the mouse verbs are ours: `click X Y` and its variants,
`move`, `drag`, `scroll`.

`<fail/>` is ours, too: it distinguishes an infeasible task from a finished one. A typed line break is an Enter. Quotes
around a text are removed, quotes that belong to it are kept. A text that begins or ends with a blank or a quote is
written in quotes, with its own double quotes as &quot;. In any text, the `<` of one of our tags is written as &lt;, and
the `&` of &lt; &quot; &amp; as &amp;.
"""

import math
import re
from typing import Any

from osworld_pipeline.dialects.actions import CLICKS, Arguments, Vocabulary
from osworld_pipeline.dialects.base import Grammar, Reading
from osworld_pipeline.dialects.coordinates import CoordinateSpace
from osworld_pipeline.dialects.keys import key_from_qemu, key_to_qemu
from osworld_pipeline.errors import ActionParseError

MAX_WAIT_S = 10.0
UNREAD_WAIT_S = 2.0
"""Duration of a wait whose number cannot be read. A wait without a number has none."""
MAX_DESCRIPTION_CHARS = 400
POINTING = {
    "click": "left_click",
    "rightclick": "right_click",
    "middleclick": "middle_click",
    "doubleclick": "double_click",
    "tripleclick": "triple_click",
    "move": "mouse_move",
}
"""Verbs that take one point."""
VERBS = ("sendkey", "type", "typeline", "wait", *POINTING, "drag", "scroll")
_POINTING_VERBS = {action: verb for verb, action in POINTING.items()}
_ACTION = re.compile(r"<action>(.*?)</action>", re.DOTALL)
_DONE = re.compile(r"<done\s*/?>")
_FAIL = re.compile(r"<fail\s*/?>")
_VERB = re.compile(r"\s*(\S+)(.*)", re.DOTALL)
_TAG = re.compile(r"<(?=/?action>|done\s*/?>|fail\s*/?>)")
_ENTITY = re.compile(r"&(?=(?:lt|quot|amp);)")
_ENTITIES = {"&lt;": "<", "&quot;": '"', "&amp;": "&"}
_READ_ENTITY = re.compile("|".join(_ENTITIES))


def describe(text: str) -> str:
    """The thought before the last tag, on one line."""
    tags = [match.start() for match in re.finditer(r"<(?:action|done|fail)\b", text)]
    thought = re.sub(r"<[^>]*>", " ", text[: tags[-1]] if tags else text)
    return " ".join(thought.split())[:MAX_DESCRIPTION_CHARS]


def read(text: str, space: CoordinateSpace) -> Reading:
    # A tag that ends the task takes precedence over actions in the same response, which are not run.
    if _DONE.search(text):
        return Reading(raw={"action": "terminate", "status": "success"})
    if _FAIL.search(text):
        return Reading(raw={"action": "terminate", "status": "failure"})
    bodies = _ACTION.findall(text)
    if not bodies:
        problem = "the <action> tag is never closed" if "<action>" in text else "no <action> or <done/> tag"
        raise ActionParseError(f"{problem} in the response")
    match = _VERB.fullmatch(bodies[-1])
    if match is None:
        raise ActionParseError(f"the <action> tag is empty; the actions are: {', '.join(VERBS)}")
    verb, rest = match[1].lower(), match[2].strip()
    if verb == "sendkey":
        return Reading(raw={"action": "key", "keys": _read_keys(rest)})
    if verb in ("type", "typeline"):
        return Reading(raw={"action": "type", "text": _read_text(rest) + ("\n" if verb == "typeline" else "")})
    if verb == "wait":
        return Reading(raw=_read_wait(rest))
    if verb in POINTING:
        return Reading(raw={"action": POINTING[verb], "coordinate": _read_points(verb, rest, counts=(1,))[0]})
    if verb == "drag":
        *start, end = _read_points(verb, rest, counts=(1, 2))
        return Reading(
            raw={
                "action": "left_click_drag",
                **({"start_coordinate": start[0]} if start else {}),
                "end_coordinate": end,
            }
        )
    if verb == "scroll":
        return Reading(raw=_read_scroll(rest))
    raise ActionParseError(f"unknown action '{verb[:40]}'; there are: {', '.join(VERBS)}")


def write(description: str, action: Arguments) -> str:
    thought = re.sub(r"[<>]", "", description)
    before = f"{thought}\n" if thought else ""
    if action["action"] == "terminate":
        return f"{before}<{'done' if action['status'] == 'success' else 'fail'}/>"
    return f"{before}<action>{_written(action)}</action>"


def _read_keys(text: str) -> list[str]:
    """A key or a chord, joined by hyphens or spaces. Every part must be a key, so no other text reaches a monitor."""
    if any(not char.isprintable() for char in text):
        raise ActionParseError("a key name holds a line break or a control character")
    text = _READ_ENTITY.sub(lambda match: _ENTITIES[match[0]], text)
    if len(text) == 1:
        return [text]
    return [key_from_qemu(part) for part in re.sub(r" +", "-", text).split("-")]


def _read_text(text: str) -> str:
    for quote in "\"'":
        if len(text) >= 2 and text[0] == text[-1] == quote and quote not in text[1:-1]:
            text = text[1:-1]
            break
    return _READ_ENTITY.sub(lambda match: _ENTITIES[match[0]], text)


def _read_wait(text: str) -> dict[str, Any]:
    if not text:
        return {"action": "wait"}
    try:
        seconds = float(text.removesuffix("s"))
    except ValueError:
        seconds = math.nan
    if math.isnan(seconds):
        seconds = UNREAD_WAIT_S
    return {"action": "wait", "seconds": min(max(seconds, 0.0), MAX_WAIT_S)}


def _read_points(verb: str, text: str, *, counts: tuple[int, ...]) -> list[list[float]]:
    """A number of points from `counts`; numbers are separated by blanks, commas or brackets."""
    words = re.sub(r"[,()\[\]]", " ", text).split()
    try:
        numbers = [float(word) for word in words]
    except ValueError:
        numbers = []
    if len(numbers) not in [2 * count for count in counts]:
        wanted = " or ".join(str(2 * count) for count in counts)
        raise ActionParseError(f"{verb} needs {wanted} numbers: x and y of each point")
    return [numbers[index : index + 2] for index in range(0, len(numbers), 2)]


def _read_scroll(text: str) -> dict[str, Any]:
    direction, *rest = text.lower().split() or [""]
    try:
        amount = float(rest[0]) if rest else 3.0
    except ValueError as error:
        raise ActionParseError("scroll needs up or down, and how many clicks of the wheel") from error
    places = _read_points("a place to scroll at", " ".join(rest[1:]), counts=(1,)) if rest[1:] else []
    place = {"coordinate": places[0]} if places else {}
    return {"action": "scroll", **place, "direction": direction, "amount": amount}


def _written(action: Arguments) -> str:
    if action["action"] in _POINTING_VERBS:
        return f"{_POINTING_VERBS[action['action']]} {_point(action['coordinate'])}"
    if action["action"] == "left_click_drag":
        points = [action[key] for key in ("start_coordinate", "end_coordinate") if key in action]
        return f"drag {' '.join(map(_point, points))}"
    if action["action"] == "scroll":
        place = f" {_point(action['coordinate'])}" if "coordinate" in action else ""
        return f"scroll {action['direction']} {action['amount']}{place}"
    if action["action"] == "key":
        keys = action["keys"]
        return f"sendkey {_escaped(keys[0]) if len(keys) == 1 else '-'.join(map(_part_of_chord, keys))}"
    if action["action"] == "wait":
        return f"wait {action['seconds']:g}" if "seconds" in action else "wait"
    text = action["text"]
    if text.endswith("\n"):
        return f"typeline {_quoted(text[:-1])}"
    return f"type {_quoted(text)}"


def _point(point: list[int | float]) -> str:
    return f"{point[0]} {point[1]}"


def _part_of_chord(key: str) -> str:
    return _escaped(key_to_qemu(key))


def _quoted(text: str) -> str:
    escaped = _escaped(text)
    if text == text.strip() and text[:1] not in ('"', "'") and text[-1:] not in ('"', "'"):
        return escaped
    return f'"{escaped.replace(chr(34), "&quot;")}"'


def _escaped(text: str) -> str:
    return _TAG.sub("&lt;", _ENTITY.sub("&amp;", text))


_PROMPT = """You operate a computer for the user, with its keyboard where that will do. You see its screen as a \
screenshot; the first one comes with the task.

Answer each observation with a short thought about what is on the screen and then exactly one of these tags:
<action>sendkey KEY</action> presses a key, or several held together: ret, tab, esc, spc, backspace, delete, up, down, \
left, right, home, end, pgup, pgdn, f1 to f12, ctrl-s, ctrl-a, alt-f4, alt-tab, meta_l-r
<action>type TEXT</action> types the text
<action>typeline TEXT</action> types the text and presses Enter
<action>wait SECONDS</action> waits, at most 10 seconds
<action>click X Y</action> clicks there; also rightclick, middleclick, doubleclick, tripleclick, move
<action>drag X1 Y1 X2 Y2</action> and <action>scroll down 3</action> do what they say
<done/> when the task is done
<fail/> when it cannot be done

An example:
The desktop is empty, so I open the Run dialog.
<action>sendkey meta_l-r</action>
The Run dialog is open, so I start the editor.
<action>typeline notepad</action>
The editor shows the text that was asked for, and it is saved.
<done/>

One tag in each answer. <coordinates> Check the result on the screen before you say that the task is done."""
_PROMPTS = (_PROMPT, "You operate a computer. Answer with one action tag, or done.<coordinates>")

SENDKEY = Grammar(
    name="sendkey",
    stop=("</action>", "<done/>", "<fail/>"),
    coordinate_space="model_pixels",
    vocabulary=Vocabulary(
        names=frozenset({"type", "key", "wait", "terminate", *CLICKS, "mouse_move", "left_click_drag", "scroll"}),
        takes_sequences=False,
    ),
    prompts=_PROMPTS,
    describe=describe,
    read=read,
    write=write,
)
