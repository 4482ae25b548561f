"""Arrow's types as DuckDB names them."""

import pyarrow as pa

from osworld_pipeline.columns import TIME

_NAMES = {
    pa.string(): "VARCHAR",
    pa.bool_(): "BOOLEAN",
    pa.float64(): "DOUBLE",
    pa.int8(): "TINYINT",
    pa.int32(): "INTEGER",
    pa.int64(): "BIGINT",
    TIME: "TIMESTAMP",
}


def sql_type(kind: pa.DataType) -> str:
    """Raises KeyError for a type that no table has."""
    if pa.types.is_map(kind):
        return f"MAP({sql_type(kind.key_type)}, {sql_type(kind.item_type)})"
    if pa.types.is_list(kind):
        return f"{sql_type(kind.value_type)}[]"
    if pa.types.is_struct(kind):
        return "STRUCT({})".format(", ".join(f'"{field.name}" {sql_type(field.type)}' for field in kind))
    return _NAMES[kind]
