"""HTML pages: templates that escape all text of models and tasks, and their filters for texts and shapes."""

import hashlib
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from osworld_pipeline.domain.episode import Outcome
from osworld_pipeline.web.viewer.evaluations import evaluation_words, suite_words
from osworld_pipeline.web.viewer.marks import Mark

_FOLDER = Path(__file__).parent
STATIC = _FOLDER / "static"
STATIC_TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
STAGE_NAMES = {
    "base": "Base",
    "external": "External",
    "sft": "SFT",
    "flywheel": "Flywheel",
    "gspo_phase1": "GSPO phase 1",
    "gspo_phase2": "GSPO phase 2",
}
NOT_KNOWN = "–"


def render(template: str, **values: Any) -> str:
    """The page; `values` are data, escaped."""
    return _environment().get_template(template).render(**values)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_FOLDER / "templates" / "viewer"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "stage_name": stage_name,
        "facet_value": facet_value,
        "figure": figure,
        "percent": percent,
        "seconds": seconds,
        "when": when,
        "counted": counted,
        "px": px,
        "outcome_kind": outcome_kind,
        "words": lambda text: str(text).replace("_", " "),
        "row_id": row_id,
        "evaluation_words": evaluation_words,
        "suite_words": suite_words,
    }
    environment.globals |= {
        "static": static_url,
        "episode_url": episode_url,
        "group_url": group_url,
        "url": with_query,
        "arrow": arrow,
        "scroll_arrow": scroll_arrow,
    }
    return environment


@cache
def static_url(name: str) -> str:
    """The address with a digest, so that it can be cached permanently."""
    return f"/static/{name}?v={hashlib.sha256((STATIC / name).read_bytes()).hexdigest()[:12]}"


def episode_url(episode_id: str, **query: Any) -> str:
    return with_query(f"/episode/{quote(episode_id, safe='')}", **query)


def group_url(group_id: str, **query: Any) -> str:
    return with_query(f"/group/{quote(group_id, safe='')}", **query)


def row_id(name: str) -> str:
    """Id of the link to an episode or a group in a list: the address back to the list names it, and browsers focus
    it."""
    return f"row-{name}"


def with_query(path: str, **query: Any) -> str:
    """`path` with the non-empty values of `query`; a list makes one pair for each item."""
    pairs = [(name, one) for name, value in query.items() for one in (value if isinstance(value, list) else [value])]
    text = urlencode([(name, str(value)) for name, value in pairs if value not in (None, "")])
    return f"{path}?{text}" if text else path


def stage_name(stage: str | None) -> str:
    return STAGE_NAMES.get(stage or "", stage or "unknown")


def facet_value(value: str, facet: str) -> str:
    """Formatted for people."""
    if facet == "stage":
        return STAGE_NAMES.get(value, value)
    return value.replace("_", " ") if facet in ("outcome", "purpose") else value


def outcome_kind(outcome: str | None) -> str:
    """good, bad or fault: its colour."""
    if outcome == Outcome.SUCCESS:
        return "good"
    return "bad" if outcome in (Outcome.FAILURE, Outcome.TRUNCATED, Outcome.TAMPERING) else "fault"


def figure(value: float | None, digits: int = 2) -> str:
    """A number formatted for people; a dash if it is unknown."""
    if value is None or not math.isfinite(value):
        return NOT_KNOWN
    return f"{value:.{digits}f}"


def percent(share: float | None) -> str:
    return f"{share:.0%}" if share is not None and math.isfinite(share) else NOT_KNOWN


def seconds(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return NOT_KNOWN
    if value < 0.0995:
        return f"{1000 * value:.0f} ms"
    if value < 9.95:
        return f"{value:.1f} s"
    return f"{value:.0f} s" if value < 120 else f"{value / 60:.1f} min"


def when(unix_time: float | None) -> str:
    """A time in UTC."""
    if not unix_time or not math.isfinite(unix_time):
        return NOT_KNOWN
    try:
        return datetime.fromtimestamp(unix_time, UTC).strftime("%Y-%m-%d %H:%M")
    except (OverflowError, ValueError, OSError):
        return NOT_KNOWN


def counted(count: int, word: str, plural: str = "") -> str:
    return f"{count:,} {word if count == 1 else plural or word + 's'}"


def px(value: float) -> str:
    """A coordinate of an SVG."""
    return f"{value:.1f}".rstrip("0").rstrip(".")


def arrow(mark: Mark, size: float) -> str:
    """The corners of a drag's arrow head, with its tip at the end; empty for a drag of length 0."""
    assert mark.to_x is not None, "only a drag has an end"
    assert mark.to_y is not None, "only a drag has an end"
    return _head(mark.x, mark.y, mark.to_x, mark.to_y, size)


def scroll_arrow(mark: Mark, size: float) -> Mapping[str, Any]:
    """A line from the position in the scroll direction, and the corners of its head."""
    right, down = {"up": (0, -1), "down": (0, 1), "left": (-1, 0), "right": (1, 0)}.get(mark.direction, (0, 1))
    x, y = mark.x + 3 * size * right, mark.y + 3 * size * down
    return {"x": x, "y": y, "head": _head(mark.x, mark.y, x, y, size)}


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
