"""Tables and views of the catalog as inputs of assets outside this project."""

from typing import TYPE_CHECKING

import dagster as dg

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import TableError
from osworld_pipeline.tables.query import query_arrow

if TYPE_CHECKING:
    import pyarrow as pa

TABLE, SQL = "table", "sql"
"""Metadata of an input: the name of a table or view where it differs from the asset's, or a query instead."""
READ_LIMIT_S = 600.0


class CatalogTables(dg.IOManager):
    """Loads an input as a pyarrow.Table; cannot write. One snapshot of the store for each input."""

    def __init__(self, state: StateDir) -> None:
        self._state = state

    def load_input(self, context: dg.InputContext) -> "pa.Table":
        """Raises TableError: no such table, no catalog yet, or a query that fails."""
        metadata = context.definition_metadata or {}
        sql = metadata.get(SQL)
        if sql is None:
            name = str(metadata.get(TABLE, context.asset_key.path[-1])).replace('"', '""')
            sql = f'FROM "{name}"'
        return query_arrow(self._state, str(sql), timeout_s=READ_LIMIT_S)

    def handle_output(self, context: dg.OutputContext, obj: object) -> None:
        raise TableError(
            f"the tables of {self._state.root} are read-only for {context.asset_key.to_user_string()}: give its output "
            "another IO manager"
        )


@dg.io_manager(required_resource_keys={"state"})
def catalog_tables(context: dg.InitResourceContext) -> CatalogTables:
    return CatalogTables(context.resources.state.dir())
