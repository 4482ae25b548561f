"""Decides from a series of looks whether a screen has settled after an action; uses neither a clock nor an X server."""

# pyright: reportMissingImports=false, reportMissingModuleSource=false
from PIL import Image, ImageChops

CELL = 8
"""Changes are counted in squares of this many pixels per side."""
MAX_STILL_CELLS = 64
"""Up to this many changed cells do not count as movement: a caret, a clock with seconds, or the mouse cursor."""
CALM_SHARE = 1 / 3
"""How long the screen must be without movement, as a share of the limit."""
REACTION_S = 0.5
"""Time in which a program may begin to draw. If nothing has moved since the action, the wait is at least this long."""
REACTION_SHARE = 1 / 2
"""The same as a share of the limit; the longer one applies."""
PIXEL_BYTES = 4
_IS_CHANGED = [0] + [255] * 255


class Stillness:
    """One wait after one action. A screen is a bytes object with four bytes per pixel, of which any may differ.

    Each look is compared with the screen at its last movement, not with the previous look: a caret alternates between
    two states that are both close to it, while letters that appear one by one add up to a movement."""

    def __init__(self, before: bytes, *, width: int, limit_s: float) -> None:
        """`before` is the screen before the action. Times of looks count from the end of the action."""
        self._reference = self._last = before
        self._width = width
        self._calm_s = limit_s * CALM_SHARE
        self._reaction_s = max(REACTION_S, limit_s * REACTION_SHARE)
        self._calm_since_s = 0.0
        self._has_moved = False

    def look(self, screen: bytes, at_s: float, *, is_busy: bool = False) -> bool:
        """True once the screen has settled. `is_busy`: programs of the desktop are busy, so it may still change."""
        if screen != self._last:
            self._last = screen
            if num_changed_cells(self._reference, screen, width=self._width) > MAX_STILL_CELLS:
                self._reference, self._has_moved, self._calm_since_s = screen, True, at_s
        if is_busy:
            self._calm_since_s = at_s
        return at_s - self._calm_since_s >= self._calm_s and (self._has_moved or at_s >= self._reaction_s)


def num_changed_cells(before: bytes, after: bytes, *, width: int) -> int:
    """Squares of CELL pixels per side in which two screens differ; all of them if their sizes differ."""
    stride = width * PIXEL_BYTES
    height = len(after) // stride
    if len(before) != len(after):
        return (width // CELL + 1) * (height // CELL + 1)
    images = [Image.frombuffer("L", (stride, height), screen, "raw", "L", 0, 1) for screen in (before, after)]
    difference = ImageChops.difference(*images)
    box = difference.getbbox()
    if box is None:
        return 0
    cell_bytes = CELL * PIXEL_BYTES
    corner = (box[0] // cell_bytes * cell_bytes, box[1] // CELL * CELL)
    cells = difference.crop((*corner, *box[2:])).point(_IS_CHANGED).reduce((cell_bytes, CELL))
    return cells.width * cells.height - cells.histogram()[0]
