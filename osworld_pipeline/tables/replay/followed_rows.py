"""Rows of a table of the store that is queried repeatedly while the store grows: each file is read once.

A file of the store does not change. So from one snapshot to the next only new files are read, and the rows of removed
files are dropped. Compaction writes old rows to new files, each row a few times.
"""

from collections.abc import Mapping
from typing import Any

import duckdb

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.store.part_files import COMPACTED, HEAD_OF, SEED, take_snapshot


class FollowedRows:
    """Rows of one table in a connection of the caller; the view `name` has the rows as of the last `refresh`."""

    def __init__(
        self, connection: duckdb.DuckDBPyConnection, state: StateDir, table: str, *, name: str, columns: str, where: str
    ) -> None:
        """`table`: a head table or one of its details, whose files have the same names. `columns`, `where`: SQL over
        the table's stored columns; `where` may have parameters. The table's folder has its seed file (`seed_tables`).
        """
        self._connection = connection
        self._root = state.trajectories.resolve()
        self._table, self._name, self._columns, self._where = table, name, columns, where
        self._seen: set[str] = set()
        connection.execute(f"CREATE TABLE {name}_kept AS {self._select([])} LIMIT 0")
        connection.execute(f"CREATE TABLE {name}_rewritten (part VARCHAR)")
        connection.execute(
            f"CREATE VIEW {name} AS SELECT * FROM {name}_kept WHERE NOT "  # noqa: S608 - our own names
            f"(contains(file, '/{COMPACTED}/') AND part IN (SELECT part FROM {name}_rewritten))"
        )

    def refresh(self, parameters: Mapping[str, Any]) -> int:
        """Reads the new files; returns how many. `parameters`: those of `where`, the same each time.

        Raises:
            StoreError: the manifest is damaged, lost or old.
            duckdb.Error: a file cannot be read; then the rows are unchanged.
        """
        files = take_snapshot(self._root, HEAD_OF.get(self._table, self._table))
        folder = self._root / self._table
        there = {f"{folder}/{COMPACTED}/{name}" for name in files.compacted}
        there |= {f"{folder}/{file.name}" for file in files.small}
        new, gone = sorted(there - self._seen), sorted(self._seen - there)
        ask = self._connection.execute
        ask("BEGIN")
        try:
            if gone:
                ask(f"DELETE FROM {self._name}_kept WHERE file IN (SELECT unnest($gone))", {"gone": gone})  # noqa: S608
            if new:
                ask(f"INSERT INTO {self._name}_kept {self._select(new)} WHERE {self._where}", parameters)
            ask(f"DELETE FROM {self._name}_rewritten")  # noqa: S608 - our own names
            ask(f"INSERT INTO {self._name}_rewritten SELECT unnest($parts)", {"parts": sorted(files.rewritten)})
            ask("COMMIT")
        except BaseException:
            ask("ROLLBACK")
            raise
        self._seen = there
        return len(new)

    def _select(self, files: list[str]) -> str:
        paths = [f"{self._root}/{self._table}/{SEED}", *files]
        quoted = ", ".join("'" + path.replace("'", "''") + "'" for path in paths)
        scan = f"read_parquet([{quoted}], union_by_name = true, filename = true)"
        return f"SELECT {self._columns}, filename AS file, part FROM {scan}"  # noqa: S608 - our own names
