"""When the union tables are built, and when they are reused."""

from collections.abc import Callable
from typing import Any

import pytest
from raw_samples import config, put_lines, put_task, record

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.recipes import Recipe, load_recipe
from osworld_pipeline.runs.code_version import code_version
from osworld_pipeline.runs.sources.union_build import ensure_union
from osworld_pipeline.tables.builds import UNION_TABLES
from osworld_pipeline.tables.owned import read_table, table_path

RECIPE = load_recipe("smoke")


@pytest.fixture
def state(tmp_path) -> StateDir:
    state = StateDir(tmp_path)
    put_lines(state, "bc_sft", [record("t1"), "{cut"])
    put_task(state, config("t1"))
    return state


def with_prompt(kind: str) -> Recipe:
    data = RECIPE.model_dump(mode="json")
    return Recipe.model_validate({**data, "agent": {**data["agent"], "system_prompt": kind}})


def test_unchanged_input_is_not_built_again(state: StateDir) -> None:
    first = ensure_union(state, RECIPE)
    assert (first.is_reused, first.tables["replay_buffer"].num_rows, first.num_rejects) == (False, 1, {"malformed": 1})
    stamps = {name: table_path(state, name).stat().st_mtime_ns for name in UNION_TABLES}
    second = ensure_union(state, RECIPE)
    assert second.is_reused
    assert {name: table_path(state, name).stat().st_mtime_ns for name in UNION_TABLES} == stamps
    assert second.tables == first.tables
    assert second.stats == first.stats


def add_record(state: StateDir) -> None:
    put_lines(state, "bc_sft", [record("t1"), record("t2")])


def remove_table(state: StateDir) -> None:
    table_path(state, "train_tasks").unlink()


def replace_table(state: StateDir) -> None:
    table_path(state, "rejects").write_bytes(table_path(state, "raw_counts").read_bytes())


def add_task(state: StateDir) -> None:
    put_task(state, config("t7"))


@pytest.mark.parametrize("change", [add_record, remove_table, replace_table, add_task])
def test_a_change_of_input_or_of_a_table_builds_them_again(state: StateDir, change: Callable[..., Any]) -> None:
    ensure_union(state, RECIPE)
    change(state)
    assert not ensure_union(state, RECIPE).is_reused
    assert ensure_union(state, RECIPE).is_reused
    assert read_table(state, "train_tasks").num_rows == 1


def test_another_prompt_builds_them_again(state: StateDir) -> None:
    ensure_union(state, RECIPE)
    assert not ensure_union(state, with_prompt("full")).is_reused


def test_the_same_input_in_another_folder_has_the_same_data_versions(state: StateDir, tmp_path_factory) -> None:
    other = StateDir(tmp_path_factory.mktemp("other"))
    put_lines(other, "bc_sft", [record("t1"), "{cut"])
    put_task(other, config("t1"))
    versions = [
        {name: table.data_version for name, table in ensure_union(each, RECIPE).tables.items()}
        for each in (state, other)
    ]
    assert versions[0] == versions[1]
    assert versions[0]["replay_buffer"]


def test_a_build_that_was_cut_short_is_made_again(state: StateDir) -> None:
    ensure_union(state, RECIPE)
    (state.tables / "union_tables.json").write_text("{")
    assert not ensure_union(state, RECIPE).is_reused


def test_code_versions_differ_between_modules_and_stay_the_same() -> None:
    one = code_version("osworld_pipeline.datasets")
    assert one == code_version("osworld_pipeline.datasets")
    assert one != code_version("osworld_pipeline.tables")
    assert len(one) == 12
