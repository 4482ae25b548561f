"""What the pages that show live desktops share, those of an env server and of the viewer: the style, the script and the
markup of the grid and of the enlarged desktop. Their own script follows the shared one and defines `page`."""

from functools import cache
from pathlib import Path

STYLE, SCRIPT = "desktops.css", "desktops.js"
_FOLDER = Path(__file__).parent


@cache
def style() -> str:
    return (_FOLDER / STYLE).read_text(encoding="utf-8")


@cache
def script() -> str:
    return (_FOLDER / SCRIPT).read_text(encoding="utf-8")


def markup(controls: str = "") -> str:
    """`controls`: markup of a page's own below the enlarged desktop."""
    return (_FOLDER / "desktops.html").read_text(encoding="utf-8").replace("{{controls}}", controls)
