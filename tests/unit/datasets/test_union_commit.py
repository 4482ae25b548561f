"""The tables of the union change together: no reader sees those of two builds, after a kill or a later build either."""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from raw_samples import config, put_lines, put_task, record

from osworld_pipeline.datasets.union.build import build_union_tables
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import TableError
from osworld_pipeline.recipes import load_recipe
from osworld_pipeline.runs.checkpoints.ids import training_data_digest
from osworld_pipeline.runs.gspo.job import load_gspo_tasks
from osworld_pipeline.runs.verify_replay.playback_plan import plan_playbacks
from osworld_pipeline.tables import builds
from osworld_pipeline.tables.builds import CURRENT, UNION_TABLES, current_build, remove_replaced_builds, table_paths
from osworld_pipeline.tables.catalog import fresh_views
from osworld_pipeline.tables.owned import read_table, read_table_file


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    """A state with a build of one task, and a source of another task."""
    state = StateDir(tmp_path)
    put_source(state, "one")
    build_union_tables(state, system_prompt="p", num_workers=0)
    put_source(state, "two")
    return state


def put_source(state: StateDir, task_id: str) -> None:
    put_lines(state, "bc_sft", [record(task_id)])
    for path in state.osworld_repo.rglob("*.json"):
        path.unlink()
    put_task(state, config(task_id))


def task_ids(state: StateDir) -> set[str]:
    """The task ids in all tables that have any."""
    with fresh_views(state) as views:
        sql = " UNION ".join(f"SELECT task_id FROM {name}" for name in ("union_tasks", "train_tasks", "replay_buffer"))
        return {row[0] for row in views.execute(sql).fetchall()}


def test_a_reader_that_started_before_a_build_ends_reads_one_build(state: StateDir) -> None:
    paths = table_paths(state)
    first = read_table_file(paths["union_tasks"], "union_tasks")["task_id"].to_pylist()
    build_union_tables(state, system_prompt="p", num_workers=0)
    assert first == ["one"]
    for name in ("train_tasks", "replay_buffer"):
        assert read_table_file(paths[name], name)["task_id"].to_pylist() == ["one"]
    assert task_ids(state) == {"two"}


def digest_of_training(state: StateDir) -> str:
    return training_data_digest(state, ("replay_buffer", "train_tasks"))


def reasons_against_playing(state: StateDir) -> Mapping[str, tuple[str, ...]]:
    return plan_playbacks(state, min_reward=0.5).unplayable


def tasks_of_gspo(state: StateDir) -> list[str]:
    recipe = load_recipe("demo", settings=["rollout.tasks=left_by_sft", "sft.task_share=1.0"])
    try:
        return [task.task_id for task in load_gspo_tasks(state, recipe)]
    except TableError as error:
        return [str(error)]


@pytest.mark.parametrize("read", [digest_of_training, reasons_against_playing, tasks_of_gspo])
def test_a_reader_of_several_tables_reads_one_build(
    state: StateDir, monkeypatch: pytest.MonkeyPatch, read: Callable[[StateDir], Any]
) -> None:
    expected, current, num_reads = read(state), builds.current_build, 0

    def build_before_the_second_read(asked: StateDir) -> Path | None:
        nonlocal num_reads
        num_reads += 1
        if num_reads == 2:
            build_union_tables(state, system_prompt="p", num_workers=0)
        return current(asked)

    monkeypatch.setattr(builds, "current_build", build_before_the_second_read)
    assert read(state) == expected


KILLED = """
import os, sys
from pathlib import Path
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.datasets.union.build import build_union_tables
number, real = int(sys.argv[2]), os.replace
def replace(*names):
    global number
    number -= 1
    if number < 0:
        os.kill(os.getpid(), 9)
    real(*names)
os.replace = replace
build_union_tables(StateDir(Path(sys.argv[1])), system_prompt="p", num_workers=0)
"""


@pytest.mark.parametrize("num_renames", [3, 6])
def test_a_build_killed_at_its_renames_changes_no_table(state: StateDir, num_renames: int) -> None:
    command = [sys.executable, "-c", KILLED, str(state.root), str(num_renames)]
    assert subprocess.run(command, timeout=120, check=False).returncode == -9
    assert task_ids(state) == {"one"}
    build_union_tables(state, system_prompt="p", num_workers=0)
    assert task_ids(state) == {"two"}
    assert [path.name for path in state.tables.iterdir() if path.name.startswith(".")] == []


def test_replaced_builds_and_tables_from_before_builds_are_removed_after_a_grace_period(state: StateDir) -> None:
    plain = state.tables / "rejects.parquet"
    plain.touch()
    build_union_tables(state, system_prompt="p", num_workers=0)
    builds = sorted(state.tables.glob("union-*"))
    assert len(builds) == 2
    assert remove_replaced_builds(state) == 0
    for path in (plain, *builds):
        os.utime(path, (1e9, 1e9))
    assert remove_replaced_builds(state) == 2
    assert [*state.tables.glob("union-*")] == [current_build(state)]
    assert task_ids(state) == {"two"}


def test_tables_from_before_builds_are_read_until_the_first_build(state: StateDir) -> None:
    build = current_build(state)
    assert build is not None
    for name in UNION_TABLES:
        (build / f"{name}.parquet").rename(state.tables / f"{name}.parquet")
    (state.tables / CURRENT).unlink()
    assert task_ids(state) == {"one"}


@pytest.mark.parametrize("content", ["{", "{}", '{"build": "../union-0123456789abcdef"}', '{"build": 7}'])
def test_a_damaged_note_gives_one_clear_error(state: StateDir, content: str) -> None:
    (state.tables / CURRENT).write_text(content)
    with pytest.raises(TableError, match=r"union.json is damaged .*run the union again"):
        read_table(state, "union_tasks")
