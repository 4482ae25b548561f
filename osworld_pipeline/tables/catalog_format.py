"""Whether a catalog has the tables and views of this version. A catalog that another version built is readable, but
lacks what is new, or has views that are wrong now."""

import functools
import tempfile
from pathlib import Path

import duckdb

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import TableError
from osworld_pipeline.tables.catalog import openable, rebuild_catalog

_SHAPE = """
SELECT 'view', view_name, sql FROM duckdb_views() WHERE NOT internal
UNION ALL
SELECT 'column', concat(table_name, '.', column_name), data_type FROM duckdb_columns()
WHERE table_name IN (SELECT table_name FROM duckdb_tables() WHERE NOT internal)
"""


def is_of_this_version(state: StateDir) -> bool:
    """False for a catalog with other tables or views. Raises TableError if there is none, or it cannot be read."""
    return _shape(state.catalog) == _present_shape()


@functools.cache
def _present_shape() -> frozenset[tuple[str, ...]]:
    with tempfile.TemporaryDirectory(prefix="catalog-") as folder:
        return _shape(rebuild_catalog(StateDir(Path(folder))))


def _shape(path: Path) -> frozenset[tuple[str, ...]]:
    try:
        with openable(path) as database, duckdb.connect(str(database), read_only=True) as connection:
            return frozenset(connection.execute(_SHAPE).fetchall())
    except duckdb.Error as error:
        raise TableError(f"cannot read the catalog {path}: {error}") from error
