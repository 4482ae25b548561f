"""All HTML: one set of templates, which escape all text of models and tasks. A page of the viewer loads the style
sheets; a report contains them, so that it is one file, which opens offline."""

import hashlib
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from osworld_pipeline.atomic_io import write_file
from osworld_pipeline.web import formats, names
from osworld_pipeline.web.evaluation_names import evaluation_words, suite_words
from osworld_pipeline.wire import desktops_page

_FOLDER = Path(__file__).parent
STATIC = _FOLDER / "static"
LIVE_SCRIPT = "live.js"
STATIC_TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
SHARED_STYLE = ("charts.css", "pages.css")
"""The style sheets of every page."""


def render(template: str, **values: Any) -> str:
    """The page; `values` are data, escaped."""
    return _environment().get_template(template).render(**values)


def write_page(path: Path, template: str, **values: Any) -> Path:
    """Raises StoreError: it cannot be written."""
    write_file(path, render(template, **values).encode("utf-8", "replace"))
    return path


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_FOLDER / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        one.__name__: one
        for one in (
            formats.percent, formats.points, formats.chance, formats.figure, formats.number, formats.seconds,
            formats.when, formats.counted, formats.words, formats.sentence, formats.px,
            names.stage_name, names.facet_value, names.outcome_kind, evaluation_words, suite_words, row_id,
        )
    }  # fmt: skip
    environment.globals |= {
        "not_known": formats.UNKNOWN,
        "shared_style": SHARED_STYLE,
        "style": style,
        "static": static_url,
        "episode_url": episode_url,
        "group_url": group_url,
        "url": with_query,
    }
    return environment


@cache
def style(name: str) -> Markup:
    """The text of one of our style sheets."""
    return Markup((STATIC / name).read_text(encoding="utf-8"))  # noqa: S704 - our own file


@cache
def static_url(name: str) -> str:
    """The address with a digest, so that it can be cached permanently."""
    content = static_file(name)
    assert content is not None, name
    return f"/static/{name}?v={hashlib.sha256(content).hexdigest()[:12]}"


def static_file(name: str) -> bytes | None:
    """One of our own files for browsers; None if there is none of that name."""
    if name == desktops_page.STYLE:
        return desktops_page.style().encode()
    path = {path.name: path for path in STATIC.iterdir()}.get(name)
    if path is None:
        return None
    shared = desktops_page.script() if name == LIVE_SCRIPT else ""
    return shared.encode() + path.read_bytes()


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
