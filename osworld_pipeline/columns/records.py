"""Columns and rows of a record class, by its fields that are marked as Stored. A field whose type is another such class
adds the columns of that class; a field that is neither is not stored."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from datetime import UTC as UTC_ZONE
from datetime import datetime
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import pyarrow as pa

from osworld_pipeline.columns.fields import FLAG, FLOAT, INT64, NUMBERS, RUN_IDS, TEXT, TIME, column
from osworld_pipeline.domain.stored import UTC, Stored

Row = dict[str, Any]
Record = TypeVar("Record")
_INTEGERS = {8: pa.int8(), 32: pa.int32(), 64: INT64}


def columns_of(record: type) -> list[pa.Field]:
    """The columns in the order of the fields."""
    return [one.field for one in _flat_columns(record)]


def row_of(record: Any) -> Row:
    """The values of the stored columns. If a nested record is None, its columns are None."""
    row: Row = {}
    for part in _parts(type(record)):
        value = getattr(record, part.attribute)
        if isinstance(part, _Column):
            row[part.name] = part.encode(value)
        elif value is None:
            row.update(dict.fromkeys(one.name for one in _flat_columns(part.record)))
        else:
            row.update(row_of(value))
    return row


def values_of(record: type, row: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the stored fields: the inverse of `row_of`. NULL reads as the default of a field that cannot be
    None. A nested record that may be None is None if its first column is NULL."""
    values: dict[str, Any] = {}
    for part in _parts(record):
        if isinstance(part, _Column):
            values[part.attribute] = part.decode(row[part.name])
        elif part.is_optional and row[_flat_columns(part.record)[0].name] is None:
            values[part.attribute] = None
        else:
            values[part.attribute] = record_from(part.record, row)
    return values


def record_from(record: type[Record], row: Mapping[str, Any]) -> Record:
    return record(**values_of(record, row))


def clean(row: Row) -> Row:
    """Text from models and desktops may contain a lone surrogate, which UTF-8 cannot encode: it becomes a `?`."""
    return {
        name: value.encode("utf-8", "replace").decode() if isinstance(value, str) else value
        for name, value in row.items()
    }


def utc_time(unix_time: float | None) -> datetime | None:
    """The value for timestamp columns: UTC without a zone. None for 0, which is an unknown time, and for times out of
    range."""
    if not unix_time:
        return None
    try:
        return datetime.fromtimestamp(unix_time, UTC_ZONE).replace(tzinfo=None)
    except (OverflowError, ValueError, OSError):
        return None


@dataclass(frozen=True, kw_only=True)
class _Column:
    attribute: str
    name: str
    field: pa.Field
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


@dataclass(frozen=True, kw_only=True)
class _Nested:
    attribute: str
    record: type
    is_optional: bool


@cache
def _parts(record: type) -> tuple[_Column | _Nested, ...]:
    hints = get_type_hints(record, include_extras=True)
    parts: list[_Column | _Nested] = []
    for field in fields(record):
        hint = hints[field.name]
        if get_origin(hint) is Annotated:
            kind, *marks = get_args(hint)
            stored = next(mark for mark in marks if isinstance(mark, Stored))
            default = field.default if field.default_factory is MISSING else field.default_factory()
            parts.append(_column(field.name, kind, stored, default))
        else:
            kind, is_optional = _without_none(hint)
            if is_dataclass(kind) and isinstance(kind, type) and _parts(kind):
                parts.append(_Nested(attribute=field.name, record=kind, is_optional=is_optional))
    return tuple(parts)


@cache
def _flat_columns(record: type) -> tuple[_Column, ...]:
    return tuple(
        one for part in _parts(record) for one in ((part,) if isinstance(part, _Column) else _flat_columns(part.record))
    )


def _column(attribute: str, hint: Any, stored: Stored, default: Any) -> _Column:
    kind, is_optional = _without_none(hint)
    arrow, encode, decode = _conversion(kind, stored)
    null = None if is_optional or default is MISSING else default
    name = stored.name or attribute
    return _Column(
        attribute=attribute,
        name=name,
        field=column(name, arrow, stored.doc, stored.unit, since=stored.since),
        encode=encode,
        decode=lambda value: null if value is None else decode(value),
    )


def _conversion(kind: Any, stored: Stored) -> tuple[pa.DataType, Callable[[Any], Any], Callable[[Any], Any]]:
    """Type of the column, and how values enter and leave it."""
    if kind is float and stored.unit == UTC:
        return TIME, utc_time, _unix_time
    if get_origin(kind) is tuple:
        return pa.list_(_scalar(get_args(kind)[0], stored)), list, tuple
    if get_origin(kind) is Mapping:
        is_number = get_args(kind)[1] is float
        return (NUMBERS, _number_pairs, dict) if is_number else (RUN_IDS, _pairs, dict)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return TEXT, str, kind
    return _scalar(kind, stored), _as_it_is, _as_it_is


def _scalar(kind: Any, stored: Stored) -> pa.DataType:
    if get_origin(kind) is Literal:
        return TEXT
    return {str: TEXT, bool: FLAG, float: FLOAT, int: _INTEGERS[stored.bits]}[kind]


def _without_none(hint: Any) -> tuple[Any, bool]:
    if get_origin(hint) is not UnionType:
        return hint, False
    kinds: Sequence[Any] = [kind for kind in get_args(hint) if kind is not NoneType]
    return kinds[0], len(kinds) < len(get_args(hint))


def _as_it_is(value: Any) -> Any:
    return value


def _pairs(value: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return list(value.items())


def _number_pairs(value: Mapping[str, float]) -> list[tuple[str, float]]:
    return [(name, float(number)) for name, number in value.items()]


def _unix_time(value: datetime) -> float:
    return value.replace(tzinfo=UTC_ZONE).timestamp()
