"""The page that lists all reports in a state folder."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.tables.catalog import fresh_views
from osworld_pipeline.web.evaluation_names import EvaluationName, read_evaluation_names
from osworld_pipeline.web.formats import counted, when
from osworld_pipeline.web.names import stage_name, stage_rank
from osworld_pipeline.web.pages import write_page
from osworld_pipeline.web.reports.report import REPORT_FILE

INDEX_FILE = "index.html"


@dataclass(frozen=True, kw_only=True)
class ReportLink:
    file: str
    """Relative to the index."""
    title: str
    digest: str
    """Identifies the file; empty if the title is enough."""
    about: str


def write_index(state: StateDir) -> Path:
    """Write `reports/index.html`. Raises TableError, StoreError."""
    names, begun = read_evaluation_names(state), _begun(state)
    places = {key: place for place, key in enumerate(names)}
    suites = sorted(
        state.reports.glob("suite-*.html"), key=lambda path: (places.get(_digest(path), len(places)), path.name)
    )
    stages = sorted(state.reports.glob("training-*.html"), key=lambda path: _place(path, begun))
    groups = {
        "Evaluations": [_link(path, "Success on held-out tasks") for path in state.reports.glob(REPORT_FILE)],
        "Suites": [_link(path, _suite_title(path, names), _digest(path)) for path in suites],
        "Training runs": [_link(path, _stage_title(path, begun), _digest(path)) for path in stages],
    }
    written_at = when(datetime.now(UTC).timestamp())
    return write_page(state.reports / INDEX_FILE, "reports/index.html.jinja", groups=groups, written_at=written_at)


def _link(path: Path, title: str, digest: str = "") -> ReportLink:
    return ReportLink(file=path.name, title=title, digest=digest, about=f"written {when(path.stat().st_mtime)} UTC")


def _suite_title(path: Path, names: Mapping[str, EvaluationName]) -> str:
    name = names.get(_digest(path))
    return name.words if name else path.stem.removeprefix("suite-").rpartition("-")[0]


def _stage_title(path: Path, begun: Mapping[str, tuple[float, int]]) -> str:
    stage = _stage(path)
    title = stage_name(stage)
    began_at, num_updates = begun.get(path.stem.removeprefix("training-"), (0.0, 0))
    began = f" · begun {when(began_at)} UTC" if began_at else ""
    return f"{title} · {counted(num_updates, 'update')} rolled out{began}" if num_updates else title


def _stage(path: Path) -> str:
    return path.stem.removeprefix("training-").rpartition("-")[0]


def _begun(state: StateDir) -> dict[str, tuple[float, int]]:
    """The start time (0.0: unknown) of each stage with rollouts, and the number of updates that it began."""
    sql = """
        SELECT stage_key, coalesce(min(started_at) FILTER (started_at > 0), 0.0), max("update")
        FROM episodes WHERE purpose = 'train' AND "update" >= 1 GROUP BY 1
    """
    with fresh_views(state, "episodes") as connection:
        return {row[0]: (row[1], row[2]) for row in connection.execute(sql).fetchall()}


def _digest(path: Path) -> str:
    return path.stem.rpartition("-")[2]


def _place(path: Path, begun: Mapping[str, tuple[float, int]]) -> tuple[int, float, str]:
    """Sort key: the order of training, then the start time."""
    stage = _stage(path)
    return stage_rank(stage), begun.get(path.stem.removeprefix("training-"), (0.0, 0))[0], path.name
