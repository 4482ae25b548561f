"""The page that names all reports of a state folder: those that lie in it, whenever they were written."""

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.evaluation.page import STAGE_NAMES, write_page
from osworld_pipeline.evaluation.report import REPORT_FILE

INDEX_FILE = "index.html"


@dataclass(frozen=True, kw_only=True)
class ReportLink:
    file: str
    """Relative to the index."""
    title: str
    about: str


def write_index(state: StateDir) -> Path:
    """Writes `reports/index.html`. Raises StoreError."""
    groups = {
        "Evaluations": _links(state, REPORT_FILE),
        "Suites": _links(state, "suite-*.html"),
        "Training runs": _links(state, "training-*.html"),
    }
    return write_page(state.reports / INDEX_FILE, "index.html.jinja", groups=groups, written_at=_time(None))


def _links(state: StateDir, pattern: str) -> list[ReportLink]:
    return [
        ReportLink(file=path.name, title=_title(path.stem), about=f"written {_time(path.stat().st_mtime)}")
        for path in sorted(state.reports.glob(pattern))
    ]


def _title(name: str) -> str:
    kind, _, rest = name.partition("-")
    if kind == "suite":
        suite, _, key = rest.rpartition("-")
        return f"{suite}, evaluation {key}"
    if kind == "training":
        stage, _, digest = rest.rpartition("-")
        return f"{STAGE_NAMES.get(stage, stage)}, {digest}"
    return "Success on held-out tasks"


def _time(timestamp: float | None) -> str:
    moment = datetime.now(UTC) if timestamp is None else datetime.fromtimestamp(timestamp, UTC)
    return moment.strftime("%Y-%m-%d %H:%M UTC")
