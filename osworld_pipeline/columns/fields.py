"""Arrow types of our columns, and columns with their meaning: `doc` and `unit` are in the field's metadata."""

import pyarrow as pa

TEXT = pa.string()
TEXTS = pa.list_(pa.string())
FLAG = pa.bool_()
INT32 = pa.int32()
INT64 = pa.int64()
FLOAT = pa.float64()
TIME = pa.timestamp("us")
"""UTC, without a zone."""
NUMBERS = pa.map_(pa.string(), pa.float64())
RUN_IDS = pa.map_(pa.string(), pa.string())
MESSAGES = pa.list_(
    pa.struct([("role", TEXT), ("content", pa.list_(pa.struct([("type", TEXT), ("text", TEXT)])))]),
)
TRAINED_ROWS = pa.list_(
    pa.struct(
        [("row_id", TEXT), ("kind", TEXT), ("task_id", TEXT), ("source_dataset", TEXT), ("source_path", TEXT),
         ("source_line", INT64), ("source_sha256", TEXT), ("licence", TEXT)]
    ),
)  # fmt: skip
DUPLICATES = pa.list_(
    pa.struct([("source_dataset", TEXT), ("source_path", TEXT), ("source_line", INT64), ("reward", FLOAT)]),
)


def column(name: str, kind: pa.DataType, doc: str, unit: str = "", *, since: int = 0) -> pa.Field:
    """`since`: the version in which it was added or widened; 0: before 12."""
    return pa.field(name, kind, metadata={"doc": doc, "unit": unit} | ({"since": str(since)} if since else {}))


def doc_of(field: pa.Field) -> str:
    return (field.metadata or {}).get(b"doc", b"").decode()


def since(field: pa.Field) -> int:
    return int((field.metadata or {}).get(b"since", b"0"))


def unit_of(field: pa.Field) -> str:
    return (field.metadata or {}).get(b"unit", b"").decode()
