"""Queries beyond the index: a search in the model's text, and a condition in SQL. Both run over the Parquet files in a
process that can read nothing else, for a bounded time. The found episodes are cached while the store does not change,
so that further facets are fast."""

import asyncio
import threading
from collections import OrderedDict
from functools import cache
from typing import Any

import duckdb
import pyarrow as pa

from osworld_pipeline.columns import PART_TABLES
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.store.part_files import HEAD_OF
from osworld_pipeline.web.viewer.files import StoreFiles, empty_rows, list_files, sql_list
from osworld_pipeline.web.viewer.filters import EpisodeFilter
from osworld_pipeline.web.viewer.index import EpisodeIndex
from osworld_pipeline.web.viewer.settings import QUESTION_LIMIT_S
from osworld_pipeline.web.viewer.sql_processes import SqlProcesses

MAX_KEPT = 6
"""Cached results; each is a copy of the found rows."""
Key = tuple[int, tuple[tuple[str, str], ...]]
"""The index's generation, and the texts of the filter."""


class Questions:
    """Questions of one event loop."""

    def __init__(self, state: StateDir, index: EpisodeIndex, *, limit_s: float = QUESTION_LIMIT_S) -> None:
        self._state, self._index = state, index
        self.processes = SqlProcesses(limit_s=limit_s)
        self._lock = threading.Lock()
        self._kept: OrderedDict[Key, str] = OrderedDict()

    async def source(self, chosen: EpisodeFilter) -> str:
        """The table of the index to list from: all facts, or those that match the texts of the filter. If it is
        cancelled, its queries are ended.

        Raises:
            BadQuestionError, TooBusyError: as SqlProcesses.ask.
        """
        texts = tuple(sorted(chosen.texts.items()))
        if not texts:
            return "facts"
        key = (self._index.generation, texts)
        if key not in self._kept:
            found = [await self._ask(kind, chosen.texts[kind]) for kind in ("said", "where") if kind in chosen.texts]
            return await asyncio.to_thread(self._keep, key, chosen, found)
        self._kept.move_to_end(key)
        return self._kept[key]

    async def _ask(self, kind: str, text: str) -> pa.Table:
        tables = ("steps",) if kind == "said" else tuple(PART_TABLES)
        question: dict[str, Any] = {
            "statements": await asyncio.to_thread(self._views, tables),
            "folders": sql_list([str(self._state.trajectories.resolve())]),
            "kind": kind,
            "text": text,
        }
        ids = await self.processes.ask(question)
        return pa.table({"episode_id": pa.array(ids, pa.string())})

    def _keep(self, key: Key, chosen: EpisodeFilter, found: list[pa.Table]) -> str:
        """Store the result, unless another request has stored the same meanwhile."""
        with self._lock:
            if key not in self._kept:
                condition, values = chosen.words()
                self._kept[key] = self._index.keep(condition, values, found)
                while len(self._kept) > MAX_KEPT:
                    self._index.drop(self._kept.popitem(last=False)[1])
            return self._kept[key]

    def _views(self, tables: tuple[str, ...]) -> list[str]:
        """Statements that make views of one moment."""
        found: dict[str, StoreFiles] = {}
        statements = []
        for table in tables:
            head = HEAD_OF.get(table, table)
            files = found.setdefault(head, list_files(self._state, head))
            statements += [_empty_tables()[table], f"CREATE VIEW {table} AS {_view(table, files)}"]
        return statements


@cache
def _empty_tables() -> dict[str, str]:
    """The statement for each part table that creates it empty with DuckDB's types."""
    with duckdb.connect(":memory:") as connection:
        for table, schema in PART_TABLES.items():
            connection.register("incoming", empty_rows(schema))
            connection.execute(f"CREATE TABLE no_{table} AS SELECT * FROM incoming")  # noqa: S608
            connection.unregister("incoming")
        made = dict(connection.execute("SELECT table_name, sql FROM duckdb_tables()").fetchall())
    return {table: made[f"no_{table}"] for table in PART_TABLES}


def _view(table: str, files: StoreFiles) -> str:
    parts = [f"SELECT * FROM no_{table}"]  # noqa: S608 - our own names and paths
    for is_compacted in (True, False):
        if table in HEAD_OF:
            paths = files.details(table, is_compacted=is_compacted)
        else:
            paths = files.heads(is_compacted=is_compacted)
        if not paths:
            continue
        hidden = f" WHERE part NOT IN (SELECT unnest({sql_list(sorted(files.rewritten))}))" if is_compacted else ""
        parts.append(f"SELECT * FROM read_parquet({sql_list(paths)}, union_by_name = true){hidden}")  # noqa: S608
    return " UNION ALL BY NAME ".join(parts)
