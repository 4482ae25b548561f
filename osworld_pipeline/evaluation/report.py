"""The report of a run: one HTML file that needs nothing else, with scores and their intervals, curves, filmstrips, and
what the numbers depend on. Whatever a model wrote is data: the template escapes it."""

import base64
import io
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from PIL import Image, UnidentifiedImageError

from osworld_pipeline.domain.episode import Outcome
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.durable import write_file
from osworld_pipeline.errors import StoreError
from osworld_pipeline.evaluation.curves import Curve, MetricPoint, draw_curves
from osworld_pipeline.evaluation.intervals import rate_over_tasks
from osworld_pipeline.evaluation.scores import (
    CheckpointScore,
    EvalRow,
    read_evals,
    score_checkpoints,
    successes_by_task,
)
from osworld_pipeline.tables.catalog import fresh_views
from osworld_pipeline.trajectories import BlobStore

REPORT_FILE = "report.html"
THUMBNAIL_WIDTH = 300
MAX_FILMSTRIPS = 6
MAX_FRAMES = 12
STAGE_NAMES = {
    "base": "Base",
    "external": "External",
    "sft": "SFT",
    "flywheel": "Flywheel",
    "gspo_phase1": "GSPO phase 1",
    "gspo_phase2": "GSPO phase 2",
}


@dataclass(frozen=True, kw_only=True)
class Frame:
    step_index: int
    image: str
    """A data URI; empty where the screenshot is missing."""
    response: str
    command: str


@dataclass(frozen=True, kw_only=True)
class Filmstrip:
    episode_id: str
    task_id: str
    instruction: str
    stage: str
    outcome: str
    num_steps: int
    frames: tuple[Frame, ...]


@dataclass(frozen=True, kw_only=True)
class Cell:
    successes: int
    n: int
    low: float
    high: float
    num_faults: int


def write_report(
    state: StateDir,
    *,
    metrics: Sequence[MetricPoint] = (),
    suite_digest: str = "",
    recipe_name: str = "",
    confidence: float = 0.95,
    stage_keys: Collection[str] | None = None,
) -> Path:
    """Writes `reports/report.html` from the tables as they are now; curves of reward and success come from the
    training episodes, others from `metrics`. `stage_keys` names the evaluations to show; None shows all.

    Raises:
        TableError: the tables cannot be read.
        StoreError: the report cannot be written.
    """
    rows = read_evals(state, stage_keys=stage_keys)
    scores = score_checkpoints(rows, confidence=confidence)
    html = render_report(
        scores=scores,
        rows=rows,
        curves=draw_curves([*metrics, *_rollout_metrics(state)]),
        filmstrips=_filmstrips(state, rows, scores),
        injections=_injections(state),
        suite_digest=suite_digest,
        recipe_name=recipe_name,
        confidence=confidence,
    )
    path = state.reports / REPORT_FILE
    write_file(path, html.encode("utf-8", "replace"))
    return path


def render_report(
    *,
    scores: Sequence[CheckpointScore],
    rows: Sequence[EvalRow],
    curves: Sequence[Curve],
    filmstrips: Sequence[Filmstrip],
    injections: Mapping[str, int],
    suite_digest: str,
    recipe_name: str,
    confidence: float,
) -> str:
    """The report's HTML."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["stage_name"] = lambda stage: STAGE_NAMES.get(stage, stage)
    environment.filters["percent"] = lambda share: f"{share:.1%}" if share == share else "–"
    environment.filters["figure"] = lambda value: f"{value:.2f}" if value == value else "–"
    template = environment.from_string(
        (resources.files("osworld_pipeline.evaluation") / "report.html.jinja").read_text(encoding="utf-8")
    )
    return template.render(
        scores=scores,
        families=family_table(rows, scores, confidence=confidence),
        fault_kinds=dict(sorted(Counter(row.outcome for row in rows if not row.is_valid).items())),
        fault_examples=_fault_examples(rows),
        curves=curves,
        filmstrips=filmstrips,
        injections=injections,
        facts=_facts(rows, suite_digest, recipe_name),
        confidence=confidence,
        num_tasks=len({row.task_id for row in rows}),
    )


def family_table(
    rows: Sequence[EvalRow], scores: Sequence[CheckpointScore], *, confidence: float
) -> dict[str, list[Cell]]:
    """For each family a cell for each checkpoint, in the order of `scores`."""
    table: dict[str, list[Cell]] = {}
    for family in sorted({row.family for row in rows}):
        cells = []
        for score in scores:
            mine = [
                row
                for row in rows
                if row.family == family and (row.checkpoint_id, row.stage_key) == (score.checkpoint_id, score.stage_key)
            ]
            rate = rate_over_tasks(list(successes_by_task(mine).values()), confidence=confidence)
            low, high = rate.interval.low, rate.interval.high
            cells.append(Cell(successes=rate.successes, n=rate.n, low=low, high=high, num_faults=len(mine) - rate.n))
        table[family] = cells
    return table


def thumbnail(data: bytes) -> str:
    """A small JPEG as a data URI; empty where `data` is no image."""
    try:
        with Image.open(io.BytesIO(data)) as image:
            small = image.convert("RGB")
    except (UnidentifiedImageError, OSError):
        return ""
    height = max(1, round(small.height * THUMBNAIL_WIDTH / small.width))
    if small.width > THUMBNAIL_WIDTH:
        small = small.resize((THUMBNAIL_WIDTH, height), Image.Resampling.LANCZOS)
    sink = io.BytesIO()
    small.save(sink, "JPEG", quality=80)
    return "data:image/jpeg;base64," + base64.b64encode(sink.getvalue()).decode()


def _facts(rows: Sequence[EvalRow], suite_digest: str, recipe_name: str) -> dict[str, str]:
    """What the numbers depend on; several values where they were not all the same."""
    seeds = sorted({row.seed for row in rows})
    return {
        "Recipe": recipe_name or "not recorded",
        "Suite": _distinct(row.suite for row in rows),
        "Suite hash": suite_digest or "not recorded",
        "Step budget": _distinct(row.max_turns for row in rows if row.max_turns),
        "Seeds": ", ".join(map(str, seeds)) or "none",
        "Temperature": _distinct(row.temperature for row in rows),
        "Provider": _distinct(row.provider for row in rows if row.is_valid),
        "Desktop image": _distinct(row.image_digest for row in rows if row.is_valid),
        "Grader version": _distinct(row.grader_version for row in rows if row.is_valid),
    }


def _distinct(values: Any) -> str:
    return ", ".join(sorted({str(value) for value in values if value not in (None, "")})) or "not recorded"


def _fault_examples(rows: Sequence[EvalRow]) -> list[EvalRow]:
    """One episode for each kind of fault."""
    first: dict[str, EvalRow] = {}
    for row in rows:
        if not row.is_valid:
            first.setdefault(row.outcome, row)
    return [first[kind] for kind in sorted(first)]


def _rollout_metrics(state: StateDir) -> list[MetricPoint]:
    """Mean rewards and success of each update's valid episodes, and injections, as the store tells them."""
    sql = """
        SELECT coalesce(c.stage, e.stage_key) AS stage, e."update" AS at, avg(e.task_reward), avg(e.shaped_reward)
        FROM episodes e LEFT JOIN checkpoints c ON c.checkpoint_id = e.stage_key
        WHERE e.purpose = 'train' AND e.is_valid AND e."update" >= 0 GROUP BY 1, 2 ORDER BY 1, 2
    """
    with fresh_views(state) as connection:
        found = connection.execute(sql).fetchall()
    points = []
    for stage, update, task, shaped in found:
        for name, value in (("rollout task reward", task), ("rollout shaped reward", shaped)):
            if value is not None:
                points.append(MetricPoint(stage=stage, update=update, name=name, value=value))
    return points


def _injections(state: StateDir) -> dict[str, int]:
    with fresh_views(state) as connection:
        found = connection.execute(
            "SELECT source_dataset, count(*) FROM injections GROUP BY 1 ORDER BY 2 DESC, 1"
        ).fetchall()
    return dict(found)


def _filmstrips(state: StateDir, rows: Sequence[EvalRow], scores: Sequence[CheckpointScore]) -> list[Filmstrip]:
    """Of the latest checkpoints a success and a failure each, of different families where there are some."""
    chosen: list[EvalRow] = []
    for score in reversed(scores):
        for outcome in (Outcome.SUCCESS, Outcome.FAILURE, Outcome.TRUNCATED):
            candidates = [row for row in rows if row.checkpoint_id == score.checkpoint_id and row.outcome == outcome]
            seen = {row.family for row in chosen}
            candidates.sort(key=lambda row: (row.family in seen, -row.turns, row.episode_id))
            chosen += candidates[:1]
    return [_filmstrip(state, row) for row in chosen[:MAX_FILMSTRIPS]]


def _filmstrip(state: StateDir, row: EvalRow) -> Filmstrip:
    blobs = BlobStore(state.blobs)
    with fresh_views(state) as connection:
        steps = connection.execute(
            "SELECT step_index, screenshot_sha256, response_text, command FROM steps WHERE episode_id = ? ORDER BY 1",
            [row.episode_id],
        ).fetchall()
        told = connection.execute("SELECT instruction FROM union_tasks WHERE task_id = ?", [row.task_id]).fetchone()
    return Filmstrip(
        episode_id=row.episode_id,
        task_id=row.task_id,
        instruction=told[0] if told else "",
        stage=row.stage or "",
        outcome=row.outcome,
        num_steps=len(steps),
        frames=tuple(
            Frame(step_index=index, image=_image(blobs, sha256), response=response or "", command=command or "")
            for index, sha256, response, command in steps[:MAX_FRAMES]
        ),
    )


def _image(blobs: BlobStore, sha256: str) -> str:
    try:
        return thumbnail(blobs.read(sha256))
    except StoreError:
        return ""
