"""A checkpoint to publish: its weights and processor, and a model card with its ancestors, their training data and
licences, and its scores."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import duckdb
import orjson

from osworld_pipeline.domain.checkpoint import Checkpoint
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import DatasetError
from osworld_pipeline.evaluation.scores import CheckpointScore, read_evals, score_checkpoints
from osworld_pipeline.progress import OnProgress
from osworld_pipeline.publishing.publication import (
    CARD,
    RECORD,
    LicensedRows,
    Publication,
    PublishedFile,
    markdown_table,
    need_licence,
    need_licences,
    read_files,
)
from osworld_pipeline.runs.checkpoints.endpoints import is_address
from osworld_pipeline.runs.checkpoints.registry import register_checkpoint
from osworld_pipeline.tables.catalog import fresh_views

REMEDY = "name it with --source-licence NAME=LICENCE, after asking its authors"
OWN = "this pipeline"
RECIPE_FILE = "recipe.json"
_STATE_OF_TRAINING = ("trainer_state.json", "manifest.json", "checkpoint.json", "base.json", CARD, RECORD, RECIPE_FILE)
"""Files that are not published: they contain local paths, or are generated."""
_FOLDERS = (".", "adapter")
_TRAINED_ON = """
SELECT m.kind, m.how, m.source_dataset AS source, max(m.licence) AS licence, count(*) AS rows
FROM ancestry a JOIN made_from m ON m.checkpoint_id = a.ancestor_id
WHERE a.checkpoint_id = ? AND m.kind <> 'group'
GROUP BY m.kind, m.how, source, nullif(lower(m.licence), '')
ORDER BY ALL
"""
_WEIGHTS = """
SELECT ancestor_id AS source, nullif(licence, 'unknown') AS licence
FROM licences WHERE checkpoint_id = ? AND how = 'weights' ORDER BY generations
"""


def plan_checkpoint(
    state: StateDir,
    named: str,
    *,
    licence: str | None,
    source_licences: Mapping[str, str] | None = None,
    on_progress: OnProgress | None = None,
) -> Publication:
    """`licence` is that of the weights. `source_licences` states that of a source, or of an ancestor that was not
    trained here, if the tables have none.

    Raises:
        DatasetError: the weights, those of an ancestor or a source of training data have no licence; the checkpoint is
            an endpoint; or its weights are not those that were recorded.
        TableError: no such checkpoint.
        StoreError: the weights are missing.
    """
    checkpoint = register_checkpoint(state, named)
    own = need_licence(licence, of=checkpoint.checkpoint_id)
    if is_address(checkpoint.path):
        raise DatasetError(f"{named} is an endpoint ({checkpoint.path}) and has no weights to publish")
    ancestors, trained_on = _lineage(state, checkpoint, own, dict(source_licences or {}))
    need_licences(trained_on, remedy=REMEDY)
    folder = state.root / checkpoint.path
    _need_weights(checkpoint, folder)
    scores = score_checkpoints(row for row in read_evals(state) if row.checkpoint_id == checkpoint.checkpoint_id)
    recipe = _json(checkpoint.recipe)
    files = (
        *read_files(folder, _paths(folder), on_progress),
        *([PublishedFile.of(RECIPE_FILE, recipe)] if checkpoint.recipe else []),
    )
    return Publication(
        repo_type="model",
        kind="checkpoint",
        title=checkpoint.checkpoint_id,
        licence=own,
        licences=trained_on,
        files=files,
        facts={
            "checkpoint": ancestors[0],
            "ancestors": ancestors[1:],
            "evaluations": [_score(score) for score in scores],
        },
        front_matter={"library_name": "transformers", "pipeline_tag": "image-text-to-text"},
        text=_text(checkpoint, ancestors, scores, trained_on),
    )


def _lineage(
    state: StateDir, checkpoint: Checkpoint, own: str, stated: Mapping[str, str]
) -> tuple[list[dict[str, Any]], tuple[LicensedRows, ...]]:
    """The checkpoint and its ancestors, nearest first; and their training data."""
    sql = """
    SELECT c.checkpoint_id, c.stage, c.parent_id, c.num_updates, c.recipe_digest, c.data_digest, c.weights_digest,
           c.code_version, c.is_code_dirty
    FROM ancestry a JOIN checkpoints c ON c.checkpoint_id = a.ancestor_id
    WHERE a.checkpoint_id = ? ORDER BY a.generations
    """
    with fresh_views(state, "ancestry", "made_from", "licences") as connection:
        ancestors = _rows(connection, sql, checkpoint.checkpoint_id)
        trained = _rows(connection, _TRAINED_ON, checkpoint.checkpoint_id)
        weights = _rows(connection, _WEIGHTS, checkpoint.checkpoint_id)
    rows: dict[tuple[str, str, str | None], int] = {}
    for row in trained:
        source = row["source"] or "unknown"
        is_own = source == "online"
        licence = (own if is_own else None) or row["licence"] or stated.get(source)
        key = (f"{row['kind']} {row['how']}", OWN if is_own else source, licence)
        rows[key] = rows.get(key, 0) + row["rows"]
    licensed = [LicensedRows(what=what.replace("_", " "), source=source, licence=licence, rows=number)
                for (what, source, licence), number in sorted(rows.items(), key=str)]  # fmt: skip
    licensed += [
        LicensedRows(what="weights", source=row["source"], licence=row["licence"] or stated.get(row["source"]), rows=1)
        for row in weights
    ]
    return ancestors, tuple(licensed)


def _rows(connection: duckdb.DuckDBPyConnection, sql: str, checkpoint_id: str) -> list[dict[str, Any]]:
    cursor = connection.execute(sql, [checkpoint_id])
    names = [column[0] for column in cursor.description or ()]
    return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]


def _need_weights(checkpoint: Checkpoint, folder: Path) -> None:
    from osworld_pipeline.training.weights.weights_digest import weights_digest

    if weights_digest(folder) != checkpoint.weights_digest:
        raise DatasetError(
            f"the weights in {folder} are not those that were recorded for {checkpoint.checkpoint_id}: restore them "
            "from a copy, or train it again"
        )


def _paths(folder: Path) -> list[Path]:
    paths = sorted(path for name in _FOLDERS for path in (folder / name).glob("*") if path.is_file())
    return [path for path in paths if path.name not in _STATE_OF_TRAINING and not path.name.startswith(".")]


def _json(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS | orjson.OPT_APPEND_NEWLINE)


def _score(score: CheckpointScore) -> dict[str, Any]:
    is_known = score.n > 0
    return {
        "evaluation": score.stage_key,
        "success_rate": score.success_rate if is_known else None,
        "low": score.low if is_known else None,
        "high": score.high if is_known else None,
        "confidence": score.confidence,
        "num_success": score.successes,
        "num_valid": score.n,
        "num_faults": score.num_faults,
        "num_tasks": score.num_tasks,
        "desktops": score.desktops,
    }


def _text(
    checkpoint: Checkpoint,
    ancestors: list[dict[str, Any]],
    scores: list[CheckpointScore],
    trained_on: tuple[LicensedRows, ...],
) -> str:
    columns = (
        "checkpoint_id",
        "stage",
        "num_updates",
        "recipe_digest",
        "data_digest",
        "weights_digest",
        "code_version",
    )
    lineage = markdown_table(columns, [[row[name] for name in columns] for row in ancestors])
    evaluations = markdown_table(
        ("evaluation", "success", "interval", "n", "faults", "desktops"),
        [
            (
                score.stage_key,
                f"{score.success_rate:.1%}" if score.n else "unknown",
                f"{score.low:.1%} - {score.high:.1%} ({score.confidence:.0%})" if score.n else "",
                f"{score.successes}/{score.n}",
                score.num_faults,
                score.desktops,
            )
            for score in scores
        ],
    )
    parts = [f"{row.source} ({row.what}, {row.rows:,} rows)" for row in trained_on if row.what != "weights"]
    data = "; ".join(parts) or "no data of its own"
    return (
        f"A vision-language agent for computer use, stage `{checkpoint.stage}`, after {checkpoint.num_updates:,} "
        f"updates. Trained on: {data}.\n\n"
        f"## Lineage\n\nThis checkpoint first, then its ancestors.\n\n{lineage}\n"
        f"## Evaluations\n\nRaw success by the graders; n excludes faults.\n\n"
        f"{evaluations if scores else 'It was not evaluated.'}\n"
    )
