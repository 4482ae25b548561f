"""Raw sources: what a line may contain, and that a bad line does not affect the others."""

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from raw_samples import SOURCES, config, put_lines, put_table, put_task, record

from osworld_pipeline.datasets.raw import (
    REPLAY_SOURCES,
    TASK_SOURCES,
    RawRecord,
    RawTask,
    Reject,
    read_demonstrations,
    read_tasks,
    summarise_source,
)
from osworld_pipeline.domain.replay import base_task_id
from osworld_pipeline.domain.state import StateDir


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    return StateDir(tmp_path)


@pytest.mark.parametrize(
    ("task_id", "base"),
    [("a_chunk3", "a"), ("a", "a"), ("a_chunk1_chunk12", "a_chunk1"), ("a_chunky", "a_chunky"), ("_chunk1", "_chunk1")],
)
def test_the_base_id_is_the_part_before_the_last_chunk(task_id: str, base: str) -> None:
    assert base_task_id(task_id) == base


def test_the_six_sources_have_the_ranks_of_their_quality() -> None:
    assert {source.name: source.quality_rank for source in REPLAY_SOURCES} == {
        "sft_curated_final": 5, "sft_curated_v3": 4, "sft_hybrid": 3, "combined_sft": 2, "sft_clean": 1, "bc_sft": 0,
    }  # fmt: skip


@pytest.mark.parametrize("source", [*REPLAY_SOURCES, *TASK_SOURCES], ids=lambda source: source.name)
def test_an_absent_source_has_no_rows(state: StateDir, source) -> None:
    summary = summarise_source(state, source)
    assert (summary.is_present, summary.num_records, summary.num_rejects) == (False, 0, 0)


@pytest.mark.parametrize(
    "place",
    [
        {"task_id": "t_chunk2"},
        {"id": "t_chunk2"},
        {"metadata": {"task_id": "t_chunk2"}},
        {"metadata": {"id": "t_chunk2"}},
        {"task_id": None, "id": "t_chunk2"},
    ],
)
def test_the_task_id_is_found_where_sources_put_it(state: StateDir, place: dict) -> None:
    source = put_lines(state, "bc_sft", [record(**({"task_id": ...} | place))])
    (read,) = read_demonstrations(state, source)
    assert isinstance(read, RawRecord)
    assert (read.task_id, read.base_id) == ("t_chunk2", "t")


def test_turns_may_be_in_the_field_conversations(state: StateDir) -> None:
    source = put_lines(state, "bc_sft", [record(messages=..., conversations=[{"role": "user", "content": "x"}])])
    (read,) = read_demonstrations(state, source)
    assert isinstance(read, RawRecord)
    assert read.messages == ({"role": "user", "content": "x"},)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"task_id": "t", "mess', "not JSON"),
        ("[1, 2]", "not a JSON object"),
        ('"text"', "not a JSON object"),
        (record(task_id=...), "no task id"),
        (record(task_id=7), "the task id is not text but int"),
        (record(messages=...), "no messages"),
        (record(messages="user: hi"), "not a list of objects"),
        (record(messages=["hi"]), "not a list of objects"),
        (record(images="abc"), "images are not a list"),
        (record(images=[{"bytes": 1}]), "images are not a list"),
        (record(reward="high"), "reward is not a number"),
        (record(reward=True), "reward is not a number"),
    ],
)
def test_a_line_that_cannot_be_used_is_a_reject_with_its_line_number(state: StateDir, line, reason: str) -> None:
    source = put_lines(state, "sft_clean", [record(), "", line, record("t2")], ending="")
    first, reject, last = read_demonstrations(state, source)
    assert isinstance(first, RawRecord)
    assert isinstance(last, RawRecord)
    assert isinstance(reject, Reject)
    assert (reject.source, reject.line_no, reject.kind) == ("sft_clean", 3, "malformed")
    assert reason in reject.reason


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.binary(max_size=40) | st.from_type(dict).map(lambda value: repr(value).encode()), max_size=5))
def test_no_bytes_stop_the_reader(tmp_path: Path, lines: list[bytes]) -> None:
    state = StateDir(tmp_path)
    path = SOURCES["bc_sft"].locate(state)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\n".join(lines) + b"\n" + json.dumps(record("good")).encode())
    *_, last = read_demonstrations(state, SOURCES["bc_sft"])
    assert isinstance(last, RawRecord)
    assert last.task_id == "good"


def test_exploratory_rollouts_need_only_an_id(state: StateDir) -> None:
    source = put_lines(state, "exploratory_rollouts", [{"id": "a_chunk1"}, {"turns": 3}])
    task, reject = read_tasks(state, source)
    assert isinstance(task, RawTask)
    assert (task.base_id, task.config) == ("a", None)
    assert isinstance(reject, Reject)


def test_task_tables_give_configs_where_they_have_them(state: StateDir) -> None:
    rows = [
        {"task_id": "a", "domain": "chrome", "task_config": json.dumps(config("a"))},
        {"task_id": "b", "domain": None, "task_config": None},
        {"task_id": "c", "domain": "os", "task_config": "{broken"},
        {"task_id": None, "domain": "os", "task_config": "{}"},
    ]
    a, b, c, c_again, d = read_tasks(state, put_table(state, "distill_train", rows))
    assert isinstance(a, RawTask)
    assert a.config == config("a")
    assert a.domain == "chrome"
    assert isinstance(b, RawTask)
    assert b.config is None
    assert isinstance(c, Reject)
    assert "task_config is not JSON" in c.reason
    assert isinstance(c_again, RawTask)
    assert (c_again.base_id, c_again.config) == ("c", None)
    assert isinstance(d, Reject)


def test_tables_of_ids_never_give_configs(state: StateDir) -> None:
    rows = [{"task_id": "a", "task_config": json.dumps(config("a"))}]
    (task,) = read_tasks(state, put_table(state, "gspo_tasks", rows))
    assert isinstance(task, RawTask)
    assert task.config is None


def test_the_tree_has_every_json_with_an_id_and_an_instruction(state: StateDir) -> None:
    put_task(state, config("a"), domain="chrome")
    (state.osworld_repo / "evaluation_examples" / "test_all.json").write_text('{"chrome": ["a"]}')
    (state.osworld_repo / "broken.json").write_text("{")
    reject, task = sorted(read_tasks(state, SOURCES["osworld_repo"]), key=lambda item: type(item).__name__ == "RawTask")
    assert isinstance(task, RawTask)
    assert (task.base_id, task.domain) == ("a", "chrome")
    assert isinstance(reject, Reject)
    assert reject.path == "broken.json"


def test_a_table_that_is_not_a_parquet_file_is_a_reject(state: StateDir) -> None:
    path = SOURCES["distill_test"].locate(state)
    path.parent.mkdir(parents=True)
    path.write_text("not parquet")
    (reject,) = read_tasks(state, SOURCES["distill_test"])
    assert isinstance(reject, Reject)
    assert (reject.kind, reject.line_no) == ("unreadable", 0)
    assert "cannot be read as Parquet" in reject.reason


def test_a_summary_counts_records_rejects_and_tasks(state: StateDir) -> None:
    source = put_lines(state, "bc_sft", [record("a_chunk0"), record("a_chunk1"), record("b"), "{"])
    summary = summarise_source(state, source)
    assert (summary.num_records, summary.num_rejects, summary.num_tasks) == (3, 1, 2)
    before = summary.digest
    put_lines(state, "bc_sft", [record("a_chunk0")])
    assert summarise_source(state, source).digest != before


def test_real_osworld_tasks_are_read(real_data: Path, state: StateDir) -> None:
    state.osworld_repo.symlink_to(real_data / "osworld")
    items = list(read_tasks(state, SOURCES["osworld_repo"]))
    assert sum(isinstance(item, RawTask) for item in items) > 400
