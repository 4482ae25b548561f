"""docs/tables.md says what the columns are."""

from pathlib import Path

from osworld_pipeline.columns import OWNED_TABLES, PART_TABLES, doc_of
from osworld_pipeline.tables.describe import describe_tables

DOCUMENT = Path(__file__).parents[3] / "docs" / "tables.md"


def test_the_document_is_up_to_date() -> None:
    """If it is not: python -m osworld_pipeline.tables.describe > docs/tables.md"""
    assert DOCUMENT.read_text() == describe_tables()


def test_every_column_has_a_description() -> None:
    silent = [
        f"{table}.{field.name}"
        for table, schema in {**PART_TABLES, **OWNED_TABLES}.items()
        for field in schema
        if not doc_of(field)
    ]
    assert silent == []
    assert "|  |\n" not in describe_tables()
