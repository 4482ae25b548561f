"""Replay rows from the tables: successes only, a few at a time, and how many tasks they cover."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from replay_samples import make_row, write_rows, write_verification

from osworld_pipeline.columns import REPLAY_BUFFER
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import TableError
from osworld_pipeline.recipes.schema import ReplaySection
from osworld_pipeline.tables.owned import table_path
from osworld_pipeline.tables.replay.rows import (
    load_replay_rows,
    read_replay_columns,
    read_replay_rows,
    replay_coverage,
    verified_rewards,
)


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    return StateDir(tmp_path)


def in_small_groups(state: StateDir, num_rows: int) -> StateDir:
    """A table of many row groups, as a writer that streams leaves it."""
    path = table_path(state, "replay_buffer")
    path.parent.mkdir(parents=True)
    rows = [make_row(f"r{index:03d}", f"t{index // 2}", source_line=index) for index in range(num_rows)]
    pq.write_table(pa.Table.from_pylist(rows, schema=REPLAY_BUFFER), path, row_group_size=7)
    return state


def test_successes_are_loaded_in_the_order_of_the_table(state: StateDir) -> None:
    rows = load_replay_rows(in_small_groups(state, 30))
    assert [row.row_id for row in rows] == [f"r{index:03d}" for index in range(30)]
    assert rows[3].messages[-1] == {"role": "assistant", "content": [{"type": "text", "text": "Action: r003"}]}
    assert (rows[3].kind, rows[3].verified_reward, rows[3].is_online) == ("demonstration", None, False)


def test_an_image_stays_a_placeholder_without_text(state: StateDir) -> None:
    content = [{"type": "image", "text": None}, {"type": "text", "text": "u"}]
    write_rows(state, make_row("a", messages=[{"role": "user", "content": content}], images=["f" * 64]))
    (row,) = load_replay_rows(state)
    assert row.messages == ({"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "u"}]},)


def test_failures_are_left_out_and_verification_can_be_required(state: StateDir) -> None:
    write_rows(state, *(make_row(name, reward=reward) for name, reward in (("a", 1.0), ("b", 0.4), ("c", 0.5))))
    write_verification(state, "a", 1.0)
    write_verification(state, "b", 1.0)
    write_verification(state, "c", None)
    assert [(row.row_id, row.verified_reward) for row in load_replay_rows(state)] == [("a", 1.0), ("c", None)]
    assert [row.row_id for row in load_replay_rows(state, min_reward=0.3)] == ["a", "b", "c"]
    assert [row.row_id for row in load_replay_rows(state, require_verified=True)] == ["a"]


def test_a_missing_or_empty_table_names_what_to_materialize(state: StateDir) -> None:
    for _ in range(2):
        with pytest.raises(TableError, match="is empty: materialize replay_buffer first"):
            load_replay_rows(state)
        write_rows(state)


def test_rows_are_found_by_id_in_any_row_group(state: StateDir) -> None:
    found = read_replay_rows(in_small_groups(state, 30), ["r000", "r006", "r007", "r029", "nobody"])
    assert sorted(found) == ["r000", "r006", "r007", "r029"]
    assert found["r029"].original_task_id == "t14"
    assert read_replay_rows(state, []) == {}


def test_nothing_is_found_where_there_is_no_table(state: StateDir) -> None:
    assert read_replay_rows(state, ["a"]) == {}
    assert list(read_replay_columns(state, ("row_id", "action_types"))) == []
    assert verified_rewards(state) == {}


def test_a_column_that_an_older_table_lacks_is_null(state: StateDir) -> None:
    path = table_path(state, "replay_buffer")
    path.parent.mkdir(parents=True)
    older = pa.Table.from_pylist([make_row("a")], schema=REPLAY_BUFFER).drop_columns(["action_types"])
    pq.write_table(older, path)
    (batch,) = read_replay_columns(state, ("row_id", "action_types"))
    assert batch.to_pylist() == [{"row_id": "a", "action_types": None}]
    assert load_replay_rows(state)[0].row_id == "a"


def test_a_damaged_table_is_an_error_that_says_how_to_repair_it(state: StateDir) -> None:
    write_rows(state, make_row("a"))
    table_path(state, "replay_buffer").write_bytes(b"PAR1nonsensePAR1")
    with pytest.raises(TableError, match="remove it and materialize replay_buffer again"):
        load_replay_rows(state)


def test_the_best_grade_of_a_row_counts_and_a_fault_does_not_count(state: StateDir) -> None:
    for attempt, reward in enumerate((0.0, 1.0, None)):
        write_verification(state, "a", reward, attempt=attempt)
    write_verification(state, "b", None)
    write_verification(state, "c", 0.0)
    assert verified_rewards(state) == {"a": 1.0, "c": 0.0}


def test_coverage_names_the_tasks_without_a_row_before_and_with_verification(state: StateDir) -> None:
    write_rows(
        state,
        make_row("a", "t_chunk0"),
        make_row("b", "u"),
        make_row("c", "low", reward=0.2),
        make_row("d", "v_chunk0_chunk1"),
    )
    write_verification(state, "a", 1.0)
    write_verification(state, "b", 0.0)
    asked = ["t", "t_chunk7", "u", "low", "v", "v_chunk0"]
    coverage = replay_coverage(state, asked, ReplaySection())
    assert coverage.missing == ("low", "v", "v_chunk0")
    assert coverage.unverified == ("u", "low", "v", "v_chunk0")
    assert (coverage.share, coverage.verified_share) == (0.5, pytest.approx(1 / 3))
    assert replay_coverage(state, asked, ReplaySection(threshold=0.1)).missing == ("v", "v_chunk0")
    assert replay_coverage(state, [], ReplaySection()).share == 0.0
