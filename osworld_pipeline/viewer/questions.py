"""What the index cannot answer by itself: text in what the model said, and a condition in SQL. Both are asked of the
Parquet files in a connection that can read nothing else, for a bounded time; the episodes found are kept while the
store is the same, so that the next facet is quick again."""

import threading
from collections import OrderedDict

import duckdb
import pyarrow as pa

from osworld_pipeline.columns import PART_TABLES
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.part_files import HEAD_OF
from osworld_pipeline.tables.query import fetch_within
from osworld_pipeline.viewer.files import StoreFiles, empty_rows, list_files, sql_list
from osworld_pipeline.viewer.filters import EpisodeFilter
from osworld_pipeline.viewer.index import EpisodeIndex
from osworld_pipeline.viewer.settings import BadQuestionError

LIMIT_S = 15.0
MAX_KEPT = 6
"""Each holds a copy of the rows that it found."""
MEMORY = "2GB"


class Questions:
    """Answers them one at a time, whoever asks: a condition may use every core."""

    def __init__(self, state: StateDir, index: EpisodeIndex, *, limit_s: float = LIMIT_S) -> None:
        self._state, self._index, self._limit_s = state, index, limit_s
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[int, tuple[tuple[str, str], ...]], str] = OrderedDict()

    def source(self, chosen: EpisodeFilter) -> str:
        """The table of the index to list from: all facts, or those that the texts of the filter hold for.

        Raises:
            BadQuestionError: a condition that is none, or that takes too long.
        """
        texts = tuple(sorted(chosen.texts.items()))
        if not texts:
            return "facts"
        with self._lock:
            key = (self._index.generation, texts)
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
            found = [self._ask(kind, chosen.texts[kind]) for kind in ("said", "where") if kind in chosen.texts]
            condition, values = chosen.words()
            name = self._kept[key] = self._index.keep(condition, values, found)
            while len(self._kept) > MAX_KEPT:
                self._index.drop(self._kept.popitem(last=False)[1])
            return name

    def _ask(self, kind: str, text: str) -> pa.Table:
        with duckdb.connect(":memory:") as connection:
            try:
                self._prepare(connection, ("steps",) if kind == "said" else tuple(PART_TABLES))
                sql, values = (_SAID, [text.lower()]) if kind == "said" else (_only_condition(connection, text), [])
                return fetch_within(connection, lambda one: one.sql(sql, params=values).to_arrow_table(), self._limit_s)
            except TimeoutError as error:
                raise BadQuestionError(
                    f"stopped after {self._limit_s:g} s: choose facets instead, or ask with `osworld-pipeline query`"
                ) from error
            except duckdb.Error as error:
                raise BadQuestionError(f"DuckDB refuses the condition: {_refusal(error)}") from error

    def _prepare(self, connection: duckdb.DuckDBPyConnection, tables: tuple[str, ...]) -> None:
        """Views of one moment, and nothing else within reach."""
        found: dict[str, StoreFiles] = {}
        for table in tables:
            head = HEAD_OF.get(table, table)
            files = found.setdefault(head, list_files(self._state, head))
            connection.register("incoming", empty_rows(PART_TABLES[table]))
            connection.execute(f"CREATE TABLE no_{table} AS SELECT * FROM incoming")  # noqa: S608
            connection.unregister("incoming")
            connection.execute(f"CREATE VIEW {table} AS {_view(table, files)}")
        folder = sql_list([str(self._state.trajectories.resolve())])
        for setting in (
            f"allowed_directories = {folder}",
            "enable_external_access = false",
            "python_enable_replacements = false",
            "enable_progress_bar = false",
            f"memory_limit = '{MEMORY}'",
            "lock_configuration = true",
        ):
            connection.execute(f"SET {setting}")


_SAID = "SELECT DISTINCT episode_id FROM steps WHERE contains(lower(response_text), ?)"


def _refusal(error: duckdb.Error) -> str:
    """Its first line, and what it proposes instead."""
    first, *others = str(error).strip().splitlines()
    proposed = [line.strip() for line in others if line.startswith(("Candidate bindings:", "Did you mean"))]
    return ". ".join(line.rstrip("!.") for line in (first, *proposed))


def _only_condition(connection: duckdb.DuckDBPyConnection, text: str) -> str:
    """The question that asks for `text` as a condition.

    Raises:
        BadQuestionError: it is several statements, or what is no SELECT.
    """
    sql = f"SELECT DISTINCT episode_id FROM episodes WHERE (\n{text}\n)"  # noqa: S608 - locked and read-only
    statements = connection.extract_statements(sql)
    if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
        raise BadQuestionError("a condition is what may stand after WHERE, for example: shaped_reward > 0.5")
    return sql


def _view(table: str, files: StoreFiles) -> str:
    is_head = table not in HEAD_OF
    parts = [f"SELECT * FROM no_{table}"]  # noqa: S608 - our own names and paths
    for is_compacted in (True, False):
        paths = files.heads(is_compacted=is_compacted) if is_head else files.details(is_compacted=is_compacted)
        if not paths:
            continue
        hidden = f" WHERE part NOT IN (SELECT unnest({sql_list(sorted(files.rewritten))}))" if is_compacted else ""
        parts.append(f"SELECT * FROM read_parquet({sql_list(paths)}, union_by_name = true){hidden}")  # noqa: S608
    return " UNION ALL BY NAME ".join(parts)
