"""Exports a dataset that `datasets.load_dataset(folder)` reads: Parquet shards with the images inside, each file with
the `huggingface` metadata that makes them Image features, and a card (README.md) with the meaning, licences and origin
of the rows."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from osworld_pipeline.columns import EPISODES, SEQUENCES, STEPS
from osworld_pipeline.datasets.exporters.card import Card, LicenceCount, render_card
from osworld_pipeline.datasets.exporters.folder import export_folder, write_manifest
from osworld_pipeline.datasets.exporters.selection import OnProgress, Selection, count, export_views, stream
from osworld_pipeline.datasets.exporters.shards import DatasetConfig, ShardWriter
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import DatasetError
from osworld_pipeline.store import BlobStore
from osworld_pipeline.tables.views import NAMED_TASKS

BATCH_ROWS = {"steps": 100, "episodes": 500, "sequences": 100, "replay": 20}
"""Rows in memory at once, with their images; also the size of a row group."""
CONFIGS = tuple(BATCH_ROWS)
_EPISODES = """
SELECT {columns}, {licence} AS licence, t.instruction, coalesce(t.domain, nullif(e.domain, '')) AS domain
FROM episodes e LEFT JOIN ({named_tasks}) t ON t.task_id = e.task_id AND (t.is_only OR t.domain = e.domain)
"""
_STEPS = """
SELECT {columns}, e.instruction, e.domain, e.outcome, e.is_valid, e.is_success, e.task_reward,
       e.shaped_reward, e.seed, e.engine, e.temperature, e.source_dataset, e.licence
FROM steps s JOIN ({episodes}) e USING (episode_id)
"""
_SEQUENCES = """
SELECT {columns}, e.task_id, e.checkpoint_id, e.purpose, e.outcome, e.is_valid, e.is_success, e.task_reward,
       e.shaped_reward, e.processor_digest, e.temperature, e.source_dataset, e.licence
FROM sequences s JOIN ({episodes}) e USING (episode_id)
"""
CHECKPOINT_FIELDS = ("checkpoint_id", "stage", "parent_id", "recipe_digest", "data_digest", "weights_digest")
_REPLAY = "SELECT * FROM ({rows}) WHERE kind = 'demonstration'"


@dataclass(frozen=True, kw_only=True)
class HuggingFaceExport:
    """Summary of the export."""

    num_rows: dict[str, int]
    """Number of rows by config."""
    num_shards: dict[str, int]
    num_images: int
    num_unknown_licence: int
    """Rows of a source without a recorded licence; without `own_licence` also the rows of this pipeline."""


def export_huggingface(
    state: StateDir,
    target: Path,
    *,
    selection: Selection | None = None,
    configs: Collection[str] = CONFIGS,
    own_licence: str | None = None,
    max_shard_bytes: int = 500_000_000,
    batch_rows: Mapping[str, int] | None = None,
    replace: bool = False,
    on_progress: OnProgress | None = None,
) -> HuggingFaceExport:
    """Writes the dataset into a new folder `target`.

    `selection` is over `episodes` (for all configs but `replay`) and over `replay`; a condition that is valid for only
    one of them needs `configs` to exclude the other. Its checkpoints and purposes do not filter `replay`, whose rows
    are all demonstrations. `own_licence` is that of the episodes of this pipeline.

    Raises:
        DatasetError: an unknown config, or no row to export.
        TableError: a table cannot be read, or a filter is bad SQL.
        StoreError: `target` exists, an image is missing, or the file system refused.
    """
    unknown = sorted(set(configs) - set(CONFIGS))
    if unknown or not configs:
        raise DatasetError(f"no config named {', '.join(unknown) or '(none)'}; there are: {', '.join(CONFIGS)}")
    plan = _plan(selection or Selection(), own_licence, BATCH_ROWS | dict(batch_rows or {}))
    chosen = [config for config in plan if config.name in configs]
    blobs = BlobStore(state.blobs)
    with export_views(state) as connection, export_folder(target, replace=replace) as folder:
        totals = {config.name: count(connection, config.sql, of=config.view) for config in chosen}
        if not any(totals.values()):
            raise DatasetError(f"no row of {', '.join(totals)} in {state.root} passes these filters: nothing to export")
        progress = _Progress(sum(totals.values()), on_progress)
        shards: dict[str, list[Path]] = {}
        num_images = 0
        for config in chosen:
            writer = ShardWriter(folder / "data", config, blobs, max_shard_bytes)
            for batch in stream(connection, config.sql, batch_rows=config.batch_rows):
                num_images += writer.write(batch)
                progress.add(batch.num_rows)
            if files := writer.close():
                shards[config.name] = files
        licences = {config.name: _licences(connection, config.sql) for config in chosen}
        result = HuggingFaceExport(
            num_rows=totals,
            num_shards={name: len(files) for name, files in shards.items()},
            num_images=num_images,
            num_unknown_licence=sum(c.num_rows for counts in licences.values() for c in counts if not c.licence),
        )
        card = Card(
            num_rows=totals,
            shards={name: [str(file.relative_to(folder)) for file in files] for name, files in shards.items()},
            columns={name: pq.read_schema(files[0]) for name, files in shards.items()},
            licences=licences,
            checkpoints=_checkpoints(connection, chosen),
        )
        (folder / "README.md").write_text(render_card(card), encoding="utf-8")
        filters = (selection or Selection()).as_json()
        stated = [
            {"table": name, "source": one.source, "licence": one.licence, "rows": one.num_rows}
            for name, counts in licences.items()
            for one in counts
        ]
        checkpoints = [dict(zip(CHECKPOINT_FIELDS, row, strict=True)) for row in card.checkpoints]
        content = {"selection": filters, "counts": asdict(result), "licences": stated, "checkpoints": checkpoints}
        write_manifest(folder, "huggingface", content)
    return result


def _plan(selection: Selection, own_licence: str | None, batch_rows: Mapping[str, int]) -> list[DatasetConfig]:
    own = "NULL" if own_licence is None else "'" + own_licence.replace("'", "''") + "'"
    is_own = "coalesce(e.source_dataset, '') = '' AND e.purpose <> 'import'"
    licence = f"coalesce(nullif(e.licence, ''), CASE WHEN {is_own} THEN {own} END)"
    rows = selection.over(
        f"({_EPISODES.format(named_tasks=NAMED_TASKS, columns=_columns('e', EPISODES), licence=licence)})",
        reward="task_reward", checkpoint="checkpoint_id", purpose="purpose", licence="licence",
    )  # fmt: skip
    demonstrations = Selection(min_reward=selection.min_reward, licences=selection.licences, where=selection.where)
    replay = _REPLAY.format(rows=demonstrations.over("replay", reward="reward", licence="licence"))
    return [
        DatasetConfig(
            name="steps",
            view="episodes",
            sql=_STEPS.format(columns=_columns("s", STEPS), episodes=rows),
            batch_rows=100,
            image_column="screenshot",
        ),
        DatasetConfig(name="episodes", view="episodes", sql=rows, batch_rows=batch_rows["episodes"]),
        DatasetConfig(
            name="sequences",
            view="episodes",
            sql=_SEQUENCES.format(columns=_columns("s", SEQUENCES), episodes=rows),
            batch_rows=batch_rows["sequences"],
        ),
        DatasetConfig(name="replay", view="replay", sql=replay, batch_rows=batch_rows["replay"], image_column="images"),
    ]


def _columns(alias: str, schema: pa.Schema) -> str:
    """A table's columns. Maps become JSON text: the `datasets` library has no map feature."""
    return ", ".join(
        f'to_json({alias}."{field.name}")::VARCHAR AS "{field.name}"'
        if pa.types.is_map(field.type)
        else f'{alias}."{field.name}"'
        for field in schema
        if field.name not in ("licence", "domain")
    )


class _Progress:
    def __init__(self, total: int, on_progress: OnProgress | None) -> None:
        self._done, self._total, self._on_progress = 0, total, on_progress

    def add(self, num_rows: int) -> None:
        self._done += num_rows
        if self._on_progress is not None:
            self._on_progress(self._done, self._total)


def _licences(connection: duckdb.DuckDBPyConnection, sql: str) -> list[LicenceCount]:
    found = connection.execute(
        "SELECT coalesce(nullif(source_dataset, ''), 'this pipeline'), nullif(lower(licence), ''), count(*) "  # noqa: S608
        f"FROM ({sql}) GROUP BY 1, 2 ORDER BY 1, 2"
    ).fetchall()
    return [LicenceCount(source=source, licence=licence, num_rows=number) for source, licence, number in found]


def _checkpoints(connection: duckdb.DuckDBPyConnection, configs: Sequence[DatasetConfig]) -> list[tuple[Any, ...]]:
    """Id, stage, parent and digests of the checkpoints whose episodes are in the rows."""
    ids = " UNION ".join(f"SELECT checkpoint_id FROM ({config.sql})" for config in configs)  # noqa: S608 - our own SQL
    return connection.execute(
        "SELECT i.checkpoint_id, c.stage, c.parent_id, c.recipe_digest, c.data_digest, c.weights_digest "  # noqa: S608
        f"FROM ({ids}) i LEFT JOIN checkpoints c USING (checkpoint_id) "
        "WHERE i.checkpoint_id IS NOT NULL ORDER BY 1"
    ).fetchall()
