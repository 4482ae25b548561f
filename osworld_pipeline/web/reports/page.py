"""Common rendering of all HTML pages: a page is self-contained, has no scripts, and escapes all text of a model."""

import math
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from osworld_pipeline.atomic_io import write_file
from osworld_pipeline.web.charts.plots import number

STAGE_NAMES = {
    "base": "Base",
    "external": "External",
    "sft": "SFT",
    "flywheel": "Flywheel",
    "gspo_phase1": "GSPO phase 1",
    "gspo_phase2": "GSPO phase 2",
}
UNKNOWN = "–"


def write_page(path: Path, template: str, **values: Any) -> Path:
    """Write a page. Raises StoreError: it cannot be written."""
    write_file(path, render_page(template, **values).encode("utf-8", "replace"))
    return path


def render_page(template: str, **values: Any) -> str:
    """The HTML of one of this folder's templates."""
    environment = Environment(
        loader=PackageLoader("osworld_pipeline.web", "templates/reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["stage_name"] = lambda stage: STAGE_NAMES.get(stage, stage)
    environment.filters["percent"] = _percent
    environment.filters["points"] = _points
    environment.filters["figure"] = lambda value: UNKNOWN if _is_unknown(value) else f"{value:.2f}"
    environment.filters["number"] = lambda value: UNKNOWN if value is None else number(float(value))
    environment.filters["chance"] = lambda p: "< 0.001" if p < 0.001 else f"{p:.3f}"
    environment.filters["words"] = lambda name: str(name).replace("_", " ")
    environment.filters["drawn"] = Markup  # our own pictures, whose texts are already escaped
    return environment.get_template(template).render(**values)


def _percent(share: float | None) -> str:
    return UNKNOWN if share is None or _is_unknown(share) else f"{share:.1%}"


def _points(difference: float | None) -> str:
    """A difference of two shares, in points of a percent."""
    return UNKNOWN if difference is None or _is_unknown(difference) else f"{100 * difference:+.1f}"


def _is_unknown(value: float | None) -> bool:
    return value is None or math.isnan(value)
