"""Positions of an action on the screenshot that the model saw, and a short description of it.

A step keeps its action as the model wrote it, in its episode's coordinate space: pixels of the image, fractions of its
sides, or thousandths. For imported and older episodes, which do not record the space, `find_space` infers it from the
numbers: only fractions have decimals, and the command, which is in pixels of the screen, distinguishes pixels from
thousandths unless the image is square.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from osworld_pipeline.dialects.actions import POINT_KEYS, SEQUENCE, actions_in
from osworld_pipeline.dialects.coordinates import CoordinateSpace, limit_of
from osworld_pipeline.dialects.pyautogui_calls import actions_of
from osworld_pipeline.domain.pyautogui import SPECIAL_ACTIONS, parse_pyautogui
from osworld_pipeline.errors import ActionParseError
from osworld_pipeline.web.formats import px

Point = tuple[float, float]
MAX_CAPTION = 400
"""Maximum number of characters of typed text in a caption."""
_SQUARE = 0.1
"""Logarithm of width / height below which an image counts as square: pixels and thousandths cannot be distinguished."""
_NAMES = {
    "left_click": "click",
    "right_click": "right click",
    "middle_click": "middle click",
    "double_click": "double click",
    "triple_click": "triple click",
    "mouse_move": "move to",
    "left_click_drag": "drag",
    "mouse_down": "press the button",
    "mouse_up": "release the button",
}
_ENDS = {"success": "says that the task is done", "failure": "says that the task cannot be done"}
"""Claim of a policy that ends; the grader decides whether it is right."""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """One action on the image, in pixels of the image; a drag has both ends."""

    kind: str
    """point, drag or scroll."""
    x: float
    y: float
    to_x: float | None = None
    to_y: float | None = None
    direction: str = ""
    """Direction of a scroll: up, down, left or right."""
    number: int = 0
    """Position in a sequence, from 1; 0 if the turn is one action."""
    is_assumed: bool = False
    """The action has no position: this is the last position of the pointer."""
    is_outside: bool = False
    """It points outside the image, and is drawn at its edge."""

    def drag_head(self, size: float) -> str:
        """The corners of a drag's arrow head, with its tip at the end; empty for a drag of length 0."""
        assert self.to_x is not None, "only a drag has an end"
        assert self.to_y is not None, "only a drag has an end"
        return _head(self.x, self.y, self.to_x, self.to_y, size)

    def scroll_arrow(self, size: float) -> Mapping[str, Any]:
        """A line from the position in the scroll direction, and the corners of its head."""
        right, down = {"up": (0, -1), "down": (0, 1), "left": (-1, 0), "right": (1, 0)}.get(self.direction, (0, 1))
        x, y = self.x + 3 * size * right, self.y + 3 * size * down
        return {"x": x, "y": y, "head": _head(self.x, self.y, x, y, size)}


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """The drawing of one step."""

    caption: str
    marks: tuple[Mark, ...]
    pointer: Point | None
    """Position of the pointer after the step, in pixels of the image; None if unknown."""


def read_action(text: str | None) -> Mapping[str, Any] | None:
    """The `action` column: an action in normal form, or None if it is missing or invalid."""
    if not text:
        return None
    try:
        action = json.loads(text)
    except ValueError:
        return None
    if not isinstance(action, dict) or not isinstance(action.get("action"), str):
        return None
    return None if action["action"] == SEQUENCE and not isinstance(action.get("actions"), list) else action


def commanded(command: str | None) -> list[Mapping[str, Any]]:
    """The actions of a `command`, with points in pixels of the screen; empty without known calls."""
    lines = [line for line in (command or "").split("\n") if line.strip() not in SPECIAL_ACTIONS]
    try:
        return list(actions_of(parse_pyautogui("\n".join(lines)))) if any(map(str.strip, lines)) else []
    except ActionParseError:
        return []


def find_space(turns: Iterable[tuple[Mapping[str, Any] | None, str | None]], image: tuple[int, int]) -> CoordinateSpace:
    """The coordinate space of an episode that does not record it; model_pixels if the numbers do not decide. `turns`:
    action and command of each step; `image`: (width, height) of its screenshots."""
    pairs: list[tuple[Point, Point]] = []
    for action, command in turns:
        points = list(_points(action)) if action else []
        if any(isinstance(number, float) for point in points for number in point):
            return "unit"
        on_screen = [point for one in commanded(command) for point in _points(one)]
        if len(points) == len(on_screen):
            pairs += zip(points, on_screen, strict=True)
    width, height = image
    if any(x > width or y > height for (x, y), _ in pairs):
        return "thousand" if all(max(point) <= limit_of("thousand") for point, _ in pairs) else "model_pixels"
    return _space_by_scale(pairs, image) or "model_pixels"


def _space_by_scale(pairs: Sequence[tuple[Point, Point]], image: tuple[int, int]) -> CoordinateSpace | None:
    """The space, from the scales that map the model's points to the screen: for pixels both are equal, for thousandths
    their ratio is width / height. None if the two cannot be distinguished."""
    shape = math.log(image[0] / image[1]) if min(image) > 0 else 0.0
    own_x, own_y = sum(point[0] for point, _ in pairs), sum(point[1] for point, _ in pairs)
    screen_x, screen_y = sum(point[0] for _, point in pairs), sum(point[1] for _, point in pairs)
    if min(own_x, own_y, screen_x, screen_y) <= 0 or abs(shape) < _SQUARE:
        return None
    skew = math.log((screen_x / own_x) / (screen_y / own_y))
    return "thousand" if abs(skew - shape) < abs(skew) else "model_pixels"


def draw_step(
    action: Mapping[str, Any] | None,
    command: str | None,
    *,
    image: tuple[int, int],
    space: CoordinateSpace,
    pointer: Point | None,
) -> Drawn:
    """`pointer`: its position after the previous step. An action that could not be stored is drawn from its command, as
    if the image had the size of the screen."""
    if action is None:
        actions, space = commanded(command), "model_pixels"
    else:
        actions = [one for one in actions_in(action) if isinstance(one, Mapping)]
    marks: list[Mark] = []
    for number, one in enumerate(actions, start=1):
        mark = _mark(one, image, space, pointer, number if len(actions) > 1 else 0)
        if mark is None:
            continue
        marks.append(mark)
        is_drag = mark.to_x is not None and mark.to_y is not None
        pointer = (mark.to_x, mark.to_y) if is_drag else (mark.x, mark.y)  # pyright: ignore[reportAssignmentType]
    caption = "; then ".join(filter(None, map(describe, actions))) or (command or "").strip()[:MAX_CAPTION]
    return Drawn(caption=caption, marks=tuple(marks), pointer=pointer)


def _mark(
    one: Mapping[str, Any], image: tuple[int, int], space: CoordinateSpace, pointer: Point | None, number: int
) -> Mark | None:
    name = str(one.get("action", ""))
    start = _place(one, "start_coordinate" if name == "left_click_drag" else "coordinate", image, space)
    end = _place(one, "end_coordinate", image, space)
    known = start or pointer
    if name == "left_click_drag":
        if end is None:
            return None
        known = known or end
        (x, y), (to_x, to_y) = _inside(known, image), _inside(end, image)
        is_outside = (x, y, to_x, to_y) != (*known, *end)
        return Mark(
            kind="drag", x=x, y=y, to_x=to_x, to_y=to_y, number=number, is_assumed=start is None, is_outside=is_outside
        )
    if known is None or name not in (*_NAMES, "scroll", "hscroll"):
        return None
    x, y = _inside(known, image)
    return Mark(
        kind="scroll" if "scroll" in name else "point",
        x=x,
        y=y,
        direction=str(one.get("direction", "")) if "scroll" in name else "",
        number=number,
        is_assumed=start is None,
        is_outside=(x, y) != known,
    )


def describe(one: Mapping[str, Any]) -> str:
    """A short description of an action, with positions in the model's coordinates."""
    name = str(one.get("action", ""))
    if name in _NAMES:
        ends = [_shown(one[key]) for key in POINT_KEYS if key in one]
        words = _NAMES[name] + (f" ({one['button']})" if one.get("button") else "")
        if name == "left_click_drag" and len(ends) == 2:
            return f"drag from {ends[0]} to {ends[1]}"
        if name == "left_click_drag" and ends:
            return f"drag to {ends[0]}"
        if name == "mouse_move" and ends:
            return f"move to {ends[0]}"
        return f"{words} at {ends[0]}" if ends else f"{words} at the pointer"
    if name == "type":
        text = str(one.get("text", ""))
        return f"type {json.dumps(text[:MAX_CAPTION], ensure_ascii=False)}" + ("…" if len(text) > MAX_CAPTION else "")
    if name in ("key", "key_down", "key_up"):
        keys = one.get("keys")
        held = {"key": "press", "key_down": "hold", "key_up": "release"}[name]
        return f"{held} {' + '.join(map(str, keys))}" if isinstance(keys, list | tuple) else held
    if name in ("scroll", "hscroll"):
        at = f" at {_shown(one['coordinate'])}" if "coordinate" in one else ""
        return f"scroll {one.get('direction', '')} {one.get('amount', '')}".rstrip() + at
    if name == "wait":
        return f"wait {one['seconds']:g} s" if isinstance(one.get("seconds"), int | float) else "wait"
    if name == "terminate":
        return _ENDS.get(str(one.get("status", "")), "end the task")
    return name.replace("_", " ")[:MAX_CAPTION]


def _shown(point: Any) -> str:
    if not _is_point(point):
        return "an unknown place"
    return f"({point[0]:g}, {point[1]:g})"


def _points(action: Mapping[str, Any]) -> Iterable[Point]:
    for one in actions_in(action):
        if isinstance(one, Mapping):
            yield from (tuple(one[key]) for key in POINT_KEYS if _is_point(one.get(key)))


def _is_point(value: Any) -> bool:
    return (
        isinstance(value, list | tuple)
        and len(value) == 2
        and all(isinstance(number, int | float) and math.isfinite(number) for number in value)
    )


def _place(one: Mapping[str, Any], key: str, image: tuple[int, int], space: CoordinateSpace) -> Point | None:
    value: Any = one.get(key)
    if not _is_point(value):
        return None
    if space == "model_pixels":
        return float(value[0]), float(value[1])
    limit = limit_of(space)
    return value[0] * image[0] / limit, value[1] * image[1] / limit


def _inside(point: Point, image: tuple[int, int]) -> Point:
    return min(max(point[0], 0.0), float(image[0])), min(max(point[1], 0.0), float(image[1]))


def _head(x: float, y: float, to_x: float, to_y: float, size: float) -> str:
    length = math.hypot(to_x - x, to_y - y)
    if length < 1e-6:
        return ""
    right, down = (to_x - x) / length, (to_y - y) / length
    back_x, back_y = to_x - size * right, to_y - size * down
    half = size * 0.6
    corners = (
        (to_x, to_y),
        (back_x - half * down, back_y + half * right),
        (back_x + half * down, back_y - half * right),
    )
    return " ".join(f"{px(one)},{px(other)}" for one, other in corners)
