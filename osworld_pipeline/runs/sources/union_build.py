"""Decides when to build the union tables: a note next to them records their inputs and code version. They are built
again if the inputs or the code have changed, or if a table was removed or replaced."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from osworld_pipeline.atomic_io import write_file
from osworld_pipeline.datasets.sources import REPLAY_SOURCES, TASK_SOURCES
from osworld_pipeline.datasets.union.build import build_union_tables
from osworld_pipeline.dialects import STORED_DIALECT, load_dialect
from osworld_pipeline.domain.digest import digest_bytes, digest_json
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.recipes import Recipe
from osworld_pipeline.runs.checkpoints.ids import training_data_digest
from osworld_pipeline.runs.code_version import code_version
from osworld_pipeline.runs.sources.source_summaries import look_at_source
from osworld_pipeline.tables.builds import UNION_TABLES
from osworld_pipeline.tables.owned import table_path

NOTE = "union_tables.json"
MODULES = tuple(
    f"osworld_pipeline.{name}"
    for name in ("datasets", "datasets.union", "dialects", "columns", "domain.replay", "domain.task")
)
"""Our modules that determine the content of the tables."""
VERSIONED = ("union_tasks", "replay_buffer", "train_tasks")


@dataclass(frozen=True, kw_only=True)
class BuiltTable:
    num_rows: int
    stamp: tuple[int, int]
    """Size and modification time of its file."""
    data_version: str
    """Digest of its content; empty for a table without an asset."""


@dataclass(frozen=True, kw_only=True)
class UnionBuild:
    """The built tables and their inputs."""

    key: str
    """Digest of all inputs: sources, imports, prompt, dialect and code."""
    tables: Mapping[str, BuiltTable]
    stats: Mapping[str, Any]
    num_rejects: Mapping[str, int]
    """Number of rejects by kind."""
    is_reused: bool = False


def ensure_union(state: StateDir, recipe: Recipe, *, on_progress: Callable[..., None] | None = None) -> UnionBuild:
    """Builds the tables, or reuses tables built from the same input by the same code.

    Raises:
        DatasetError, StoreError: as build_union_tables.
    """
    system_prompt = load_dialect(STORED_DIALECT).system_prompt(recipe.agent.system_prompt)
    key = _key(state, system_prompt, STORED_DIALECT)
    note = state.tables / NOTE
    known = _read(note)
    if (
        known is not None
        and known.key == key
        and all(_stamp(state, name) == table.stamp for name, table in known.tables.items())
    ):
        return known
    note.unlink(missing_ok=True)
    summary = build_union_tables(state, system_prompt=system_prompt, dialect=STORED_DIALECT, on_progress=on_progress)
    built = UnionBuild(
        key=key,
        tables={name: _built(state, name) for name in UNION_TABLES},
        stats=dict(summary.stats),
        num_rejects=dict(summary.num_rejects),
    )
    fields = {name: value for name, value in asdict(built).items() if name != "is_reused"}
    write_file(note, json.dumps(fields).encode())
    return built


def _key(state: StateDir, system_prompt: str, dialect: str) -> str:
    sources = {source.name: look_at_source(state, source).digest for source in (*REPLAY_SOURCES, *TASK_SOURCES)}
    notes = [*sorted(state.imports.glob("*/source.json")), state.datasets / "sources.lock.json"]
    return digest_json(
        {
            "sources": sources,
            "notes": {
                str(path.relative_to(state.datasets)): digest_bytes(path.read_bytes())
                for path in notes
                if path.is_file()
            },
            "prompt": system_prompt,
            "dialect": dialect,
            "code": code_version(*MODULES),
        }
    )


def _built(state: StateDir, name: str) -> BuiltTable:
    path = table_path(state, name)
    return BuiltTable(
        num_rows=pq.read_metadata(path).num_rows,
        stamp=_stamp(state, name),
        data_version=training_data_digest(state, [name]) if name in VERSIONED else "",
    )


def _stamp(state: StateDir, name: str) -> tuple[int, int]:
    path = table_path(state, name)
    stat = path.stat() if path.is_file() else None
    return (stat.st_size, stat.st_mtime_ns) if stat else (-1, -1)


def _read(path: Path) -> UnionBuild | None:
    try:
        fields = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    tables = {name: BuiltTable(**{**table, "stamp": tuple(table["stamp"])}) for name, table in fields["tables"].items()}
    return UnionBuild(**{**fields, "tables": tables}, is_reused=True)
