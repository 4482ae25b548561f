"""A column is declared once, by a field of its record."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, Literal

import pyarrow as pa
import pytest

from osworld_pipeline.columns import OWNED_TABLES, PART_TABLES, SCHEMA_VERSION, doc_of, unit_of
from osworld_pipeline.columns.fields import since
from osworld_pipeline.columns.records import columns_of, record_from, row_of
from osworld_pipeline.domain.stored import SECONDS, UTC, Stored


class Colour(StrEnum):
    RED = "red"


@dataclass(frozen=True, kw_only=True)
class Part:
    size: Annotated[int, Stored("Its size.", name="part_size", bits=32)]
    note: Annotated[str, Stored("A note.", since=12)] = ""


@dataclass(frozen=True, kw_only=True)
class Record:
    name: Annotated[str, Stored("Its name.")]
    took_s: Annotated[float, Stored("Duration.", SECONDS)] = 0.0
    started_at: Annotated[float, Stored("Start.", UTC, name="started_utc")] = 0.0
    is_done: Annotated[bool | None, Stored("Whether it is done.")] = None
    colour: Annotated[Colour, Stored("Its colour.")] = Colour.RED
    kind: Annotated[Literal["a", "b"], Stored("Its kind.")] = "a"
    marks: Annotated[tuple[int, ...], Stored("Marks.", bits=8)] = ()
    times: Annotated[Mapping[str, float], Stored("Times.")] = field(default_factory=dict)
    part: Part | None = None
    not_stored: Mapping[str, Any] = field(default_factory=dict)


FULL = Record(
    name="n",
    took_s=1.5,
    started_at=1_790_000_000.25,
    is_done=True,
    kind="b",
    marks=(1, 0),
    times={"reset": 0.5},
    part=Part(size=3, note="x"),
)


def test_the_type_of_a_column_is_that_of_its_field() -> None:
    kinds = {column.name: column.type for column in columns_of(Record)}
    assert kinds == {
        "name": pa.string(), "took_s": pa.float64(), "started_utc": pa.timestamp("us"), "is_done": pa.bool_(),
        "colour": pa.string(), "kind": pa.string(), "marks": pa.list_(pa.int8()),
        "times": pa.map_(pa.string(), pa.float64()), "part_size": pa.int32(), "note": pa.string(),
    }  # fmt: skip


def test_a_column_keeps_the_meaning_and_the_unit_of_its_field() -> None:
    (took,) = (column for column in columns_of(Record) if column.name == "took_s")
    assert (doc_of(took), unit_of(took)) == ("Duration.", "s")


def test_a_column_that_is_added_later_raises_the_version_of_the_files() -> None:
    assert {field.name: since(field) for field in columns_of(Part)} == {"part_size": 0, "note": 12}
    schemas = (*PART_TABLES.values(), *OWNED_TABLES.values())
    assert max(since(field) for schema in schemas for field in schema) <= SCHEMA_VERSION


@pytest.mark.parametrize("record", [FULL, Record(name="only")])
def test_a_record_comes_back_from_its_row(record: Record) -> None:
    table = pa.Table.from_pylist([row_of(record)], schema=pa.schema(columns_of(Record)))
    assert record_from(Record, table.to_pylist()[0]) == record


def test_a_column_that_an_older_file_lacks_reads_as_the_default_of_its_field() -> None:
    row = dict.fromkeys((column.name for column in columns_of(Record)), None) | {"name": "old"}
    assert record_from(Record, row) == Record(name="old")


@pytest.mark.parametrize("table", PART_TABLES)
def test_every_column_has_a_description_and_a_unique_name(table: str) -> None:
    schema = PART_TABLES[table]
    assert all(doc_of(column) for column in schema)
    assert len(set(schema.names)) == len(schema.names)
