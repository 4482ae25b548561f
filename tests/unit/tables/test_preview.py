"""Previews: the first rows as Markdown that shows the values in the file and nothing else."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from osworld_pipeline.errors import TableError
from osworld_pipeline.tables.preview import MAX_TEXT, NOTHING, markdown_table, preview_table


def test_preview_shows_the_first_rows_and_cuts_long_texts(tmp_path) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(pa.Table.from_pylist([{"n": n, "text": "word " * 1000, "list": ["a"]} for n in range(9)]), path)
    lines = preview_table(path, num_rows=3).splitlines()
    assert lines[0] == "| n | text | list |"
    assert len(lines) == 5
    assert lines[2].startswith("| 0 | word word")
    assert len(lines[2]) < 2 * MAX_TEXT


def test_preview_of_no_rows_and_of_no_file_says_that_there_is_nothing_to_show(tmp_path) -> None:
    path = tmp_path / "t.parquet"
    assert preview_table(path) == NOTHING
    pq.write_table(pa.table({"n": pa.array([], pa.int64())}), path)
    assert preview_table(path) == NOTHING


def test_a_damaged_file_is_one_clear_error_with_the_remedy(tmp_path) -> None:
    path = tmp_path / "t.parquet"
    path.write_bytes(b"PAR1 not really PAR1")
    with pytest.raises(TableError, match=r"is damaged .* remove it and materialize it again"):
        preview_table(path)


def test_cells_cannot_break_out_of_their_table() -> None:
    table = markdown_table(("a", "b"), [("x | y\nz", "<script>`alert`</script>"), (None, 0.5)])
    assert table.splitlines()[2:] == ["| x \\| y z | \\<script\\>\\`alert\\`\\</script\\> |", "|  | 0.5 |"]
