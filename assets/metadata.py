"""Dagster metadata of a table: row count, columns with their meaning, the first rows, and rejects."""

from collections import Counter
from typing import Any

import dagster as dg
import pyarrow as pa
import pyarrow.parquet as pq

from osworld_pipeline.columns import OWNED_TABLES, doc_of, unit_of
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.runs.upkeep.invariants import Violations
from osworld_pipeline.tables.owned import table_path
from osworld_pipeline.tables.preview import markdown_table, preview_table

NUM_SHOWN = 10


def column_schema(schema: pa.Schema) -> dg.TableSchema:
    return dg.TableSchema(
        columns=[
            dg.TableColumn(
                name=field.name,
                type=str(field.type),
                description=doc_of(field) + (f" ({unit})" if (unit := unit_of(field)) else ""),
            )
            for field in schema
        ]
    )


def table_metadata(state: StateDir, name: str) -> dict[str, Any]:
    """Metadata of a table that an asset owns."""
    path = table_path(state, name)
    return {
        "dagster/row_count": pq.read_metadata(path).num_rows if path.is_file() else 0,
        "dagster/column_schema": column_schema(OWNED_TABLES[name]),
        "preview": dg.MetadataValue.md(preview_table(path)),
        "table": name,
        "file": dg.MetadataValue.path(str(path)),
        "catalog": dg.MetadataValue.path(str(state.catalog)),
    }


def reject_metadata(rejects: list[tuple[str, int, str, str]], num_rejects: int) -> dict[str, Any]:
    """`rejects`: the first ones, as file, line, kind and reason."""
    if not num_rejects:
        return {"rejects": 0}
    columns = ("file", "line", "kind", "reason")
    return {"rejects": num_rejects, "first rejects": dg.MetadataValue.md(markdown_table(columns, rejects[:NUM_SHOWN]))}


def rejects_table_metadata(state: StateDir) -> dict[str, Any]:
    """Metadata of the table of rejects: counts by kind and source, and the first ones."""
    path = table_path(state, "rejects")
    if not path.is_file():
        return {"rejects": 0}
    kinds = pq.read_table(path, columns=["source_dataset", "kind"]).to_pylist()
    by_kind = Counter((row["source_dataset"], row["kind"]) for row in kinds)
    table = markdown_table(("source", "kind", "rows"), [(*key, num) for key, num in by_kind.most_common()])
    return {
        "rejects": len(kinds),
        "rejects by kind": dg.MetadataValue.md(table),
        "first rejects": dg.MetadataValue.md(preview_table(path, num_rows=NUM_SHOWN)),
    }


def check_result(
    violations: Violations, *, severity: dg.AssetCheckSeverity = dg.AssetCheckSeverity.ERROR, what_to_do: str = ""
) -> dg.AssetCheckResult:
    """Passed if nothing was found; else the violations and the remedy."""
    metadata: dict[str, Any] = {"found": violations.num_found}
    if not violations.is_sound:
        metadata["offenders"] = dg.MetadataValue.md(markdown_table(violations.columns, violations.rows))
    return dg.AssetCheckResult(
        passed=violations.is_sound,
        severity=severity,
        metadata=metadata,
        description=None if violations.is_sound else what_to_do or None,
    )
