"""The effects of one action, measured from the observations before and after it (as in Slime-OSWorld)."""

import re

import numpy as np
from PIL import Image

from osworld_pipeline.dialects import ParsedTurn
from osworld_pipeline.dialects.actions import first_point
from osworld_pipeline.domain.digest import digest_bytes
from osworld_pipeline.domain.episode import StepSignals
from osworld_pipeline.domain.observation import Observation
from osworld_pipeline.domain.pictures import open_picture
from osworld_pipeline.errors import ReplicaError

THUMBNAIL_SIDE = 64
_QUOTED = re.compile(r"[\"'“‘]([^\"'”’]{1,80})[\"'”’]")
_NAMED = re.compile(r"\b(?:click|press|open|select|choose|close)\b(?:\s+(?:on|the))*\s+([\w .-]{1,80})", re.IGNORECASE)
_TRAILING = re.compile(r"\s+(?:button|window|icon|menu|field|entry|tab|folder|file|item|link)\b.*$", re.IGNORECASE)


def screen_thumbnail(screenshot: bytes) -> np.ndarray:
    """The screenshot as 64x64 greyscale, 0..1.

    Raises:
        ReplicaError: the bytes are not an image.
    """
    try:
        with open_picture(screenshot) as image:
            grey = image.convert("L").resize((THUMBNAIL_SIDE, THUMBNAIL_SIDE), Image.Resampling.BILINEAR)
    except (OSError, Image.DecompressionBombError) as error:
        raise ReplicaError(f"the desktop sent a screenshot of {len(screenshot)} bytes that is not an image") from error
    return np.asarray(grey, dtype=np.float32) / 255.0


def screen_diff(before: bytes, after: bytes) -> float:
    """Mean absolute difference of the thumbnails, 0..1."""
    if before == after:
        return 0.0
    return float(np.abs(screen_thumbnail(before) - screen_thumbnail(after)).mean())


def target_element(description: str) -> str | None:
    """The target of the action in the description: its first quoted name, or else the words after the verb."""
    match = _QUOTED.search(description)
    if match:
        return match.group(1).strip() or None
    match = _NAMED.search(description)
    if match is None:
        return None
    return _TRAILING.sub("", match.group(1)).strip(" .") or None


def step_signals(
    turn: ParsedTurn,
    before: Observation,
    after: Observation,
    *,
    executed: bool,
    error: str | None,
    diff_threshold: float,
) -> StepSignals:
    """`after` equals `before` if no action ran. Decodes two screenshots: call it in a thread."""
    diff = screen_diff(before.screenshot, after.screenshot)
    target = target_element(turn.description)
    tree_before, tree_after = before.accessibility_tree or "", after.accessibility_tree or ""
    point = None if turn.arguments is None else first_point(turn.arguments)
    return StepSignals(
        action_type=turn.action_type,
        action_parsed=turn.is_parsed,
        action_executed=executed,
        action_error=error,
        target_element=target,
        fallback_used=turn.fallback_used,
        coordinate=None if point is None else (_whole(point[0]), _whole(point[1])),
        a11y_grounded=target is not None and target.lower() in tree_before.lower(),
        screen_diff=diff,
        screen_changed=diff >= diff_threshold,
        screen_hash=digest_bytes(after.screenshot),
        a11y_delta=min(1.0, abs(len(tree_after) - len(tree_before)) / max(1, len(tree_before))),
        a11y_changed=tree_before != tree_after,
        terminal_changed=(before.terminal or "") != (after.terminal or ""),
    )


def _whole(coordinate: int | float) -> int:
    """A relative coordinate is stored in thousandths, because the column is an integer."""
    return coordinate if isinstance(coordinate, int) else round(1000 * coordinate)
