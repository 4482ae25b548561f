"""The name of an evaluation: the suite as commands name it, and what distinguishes it from others of that suite."""

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from episode_samples import make_episode
from hypothesis import given
from hypothesis import strategies as st

from osworld_pipeline.domain.episode import SamplingParams
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.evaluation.suite_files import HELDOUT
from osworld_pipeline.evaluation.suites.suite import build_suite
from osworld_pipeline.store import TrajectoryStore
from osworld_pipeline.web.evaluation_names import (
    UNKNOWN_SETTINGS,
    EvaluationName,
    name_evaluations,
    own_suites,
    read_evaluation_names,
    suite_of,
)

SUITE = build_suite(seed=7, num_train=4, num_heldout=2, screen=(640, 400))
HELDOUT_IDS = [item.task.task_id for item in SUITE.heldout]


def played(key: str, task_ids: Sequence[str] = ("mine-a-0001",), **changes: Any) -> dict[str, Any]:
    """One row: seed 0 at temperature 0, five turns."""
    fields = {
        "key": key, "task_ids": list(task_ids), "seeds": [0], "max_turns": [5], "temperatures": [0.0],
        "engines": ["transformers"], "began_at": 1_790_000_000.0,
    }  # fmt: skip
    if suite := re.fullmatch(r"(mine|x)-[a-z]-[0-9]+", task_ids[0] if task_ids else ""):
        changes = {"suite_name": suite[1]} | changes
    return fields | changes


def names_of(*rows: dict[str, Any], **recorded: str) -> dict[str, EvaluationName]:
    return name_evaluations(rows, suites=(), recorded=recorded)


def words_of(*rows: dict[str, Any], **recorded: str) -> dict[str, str]:
    return {key: name.words for key, name in names_of(*rows, **recorded).items()}


def write_suite(state: StateDir, name: str, *task_ids: str) -> Path:
    state.suites.mkdir(parents=True, exist_ok=True)
    evaluator = {"func": "exact_match", "result": {"type": "vm_command_line", "command": "id"},
                 "expected": {"type": "rule", "rules": {"expected": ""}}}  # fmt: skip
    tasks = [{"id": one, "instruction": f"Do {one}.", "config": [], "evaluator": evaluator} for one in task_ids]
    path = state.suites / f"{name}.json"
    path.write_text(json.dumps(tasks))
    return path


def test_an_evaluation_is_named_by_its_suite_its_seeds_and_its_temperature() -> None:
    assert words_of(played("a", HELDOUT_IDS, seeds=[2, 0, 1], temperatures=[0.6])) == {"a": "heldout · 3 seeds · T 0.6"}
    assert words_of(played("a", seeds=[1])) == {"a": "mine · seed 1 · T 0"}


def test_held_out_tasks_are_named_as_in_commands_with_the_suite_of_their_ids_next_to_it() -> None:
    assert suite_of(HELDOUT_IDS, {}) == HELDOUT
    name = names_of(played("a", HELDOUT_IDS))["a"]
    assert (name.suite, name.origin) == ("heldout", "desktop-basics")


def test_training_tasks_are_never_called_held_out() -> None:
    train = [item.task.task_id for item in SUITE.train]
    assert suite_of([*HELDOUT_IDS, train[0]], {}) == "desktop-basics"
    assert suite_of(train, {}) == "desktop-basics"
    assert suite_of(["other-a-0004"], {}) == "osworld"


def test_the_smallest_suite_of_the_user_that_has_all_tasks_gives_the_name() -> None:
    own = {"large": frozenset("abc"), "small": frozenset("ab"), "else": frozenset("xy")}
    assert suite_of(["a", "b"], own) == "small"
    assert suite_of(["a", "c"], own) == "large"
    assert suite_of(["a", "x"], own) == "osworld"
    assert suite_of(["a"], own | {"twin": frozenset("ab")}) == "small or twin"


def test_a_recorded_suite_name_takes_precedence() -> None:
    assert words_of(played("a", HELDOUT_IDS), a="osworld-test_small") == {"a": "osworld-test_small · seed 0 · T 0"}


def test_tasks_turns_and_engine_are_named_where_they_differ() -> None:
    rows = [played("a"), played("b", max_turns=[15]), played("c", engines=["openai"], began_at=1.0)]
    assert list(words_of(*rows).values()) == [
        "mine · seed 0 · T 0 · 5 turns · openai", "mine · seed 0 · T 0 · 5 turns · transformers",
        "mine · seed 0 · T 0 · 15 turns · transformers",
    ]  # fmt: skip
    parts = words_of(played("a", HELDOUT_IDS), played("b", HELDOUT_IDS[:1]), played("c"))
    assert parts["b"] == "heldout · seed 0 · T 0 · 1 task"
    assert parts["c"] == "mine · seed 0 · T 0", "another suite's differences are not its own"


def test_the_start_time_is_shown_where_nothing_else_distinguishes_two_evaluations() -> None:
    found = words_of(played("b", began_at=1_790_000_060.0), played("a"), played("c", seeds=[4]), played("d", ["x-a-1"]))
    assert list(found.values()) == [
        "mine · seed 0 · T 0 · begun 2026-09-21 14:13:20", "mine · seed 4 · T 0",
        "mine · seed 0 · T 0 · begun 2026-09-21 14:14:20", "x · seed 0 · T 0",
    ]  # fmt: skip


def test_evaluations_are_ordered_by_suite_and_time_and_not_by_key() -> None:
    rows = [played("a", ["z-a-1"]), played("b", began_at=9.0), played("c", began_at=3.0), played("d", began_at=None)]
    assert list(names_of(*rows)) == ["d", "c", "b", "a"]


def test_settings_that_were_not_recorded_are_shown_as_unknown() -> None:
    assert words_of(played("", seeds=[0, 1])) == {"": f"mine · {UNKNOWN_SETTINGS}"}
    bare = played("a", seeds=[None], temperatures=[None, float("nan")], began_at=None)
    assert words_of(bare) == {"a": f"mine · {UNKNOWN_SETTINGS}"}


@given(
    st.lists(
        st.builds(
            played, st.text("abc", max_size=2), st.lists(st.text(max_size=8), min_size=1, max_size=3),
            seeds=st.lists(st.none() | st.integers(0, 3), min_size=1, max_size=2, unique=True),
            temperatures=st.lists(st.none() | st.floats(), min_size=1, max_size=2),
            began_at=st.none() | st.floats(0, 2e9),
        ),
        max_size=6, unique_by=lambda row: row["key"],
    )
)  # fmt: skip
def test_every_evaluation_has_a_name_for_any_recorded_values(rows: list[dict[str, Any]]) -> None:
    found = names_of(*rows)
    assert set(found) == {row["key"] for row in rows}
    assert all(name.suite and name.settings for name in found.values() if name.suite)
    assert [name.order for name in found.values()] == sorted(name.order for name in found.values())


def test_suites_are_read_again_when_they_change_and_a_broken_one_is_left_out(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    assert own_suites(state) == []
    path = write_suite(state, "mine", "mine-a-0001")
    (state.suites / "broken.json").write_text("{")
    assert [[task.task_id for task in suite.tasks] for suite in own_suites(state)] == [["mine-a-0001"]]
    write_suite(state, "mine", "mine-a-0001", "mine-b-0002")
    os.utime(path, ns=(1, 1))
    assert [[task.task_id for task in suite.tasks] for suite in own_suites(state)] == [["mine-a-0001", "mine-b-0002"]]


@pytest.mark.parametrize("is_recorded", [False, True])
def test_names_come_from_the_episodes_of_a_store(tmp_path: Path, is_recorded: bool) -> None:
    state = StateDir(tmp_path)
    write_suite(state, "mine", "notes", "more")
    for seed in range(2):
        episode = make_episode(
            f"e{seed}", task_id="notes", checkpoint_id="c-1", stage_key="eval-c-1-0a", seed=seed,
            sampling=SamplingParams(temperature=0.6), started_at=1e9 + seed,
        )  # fmt: skip
        TrajectoryStore(state).write_episodes(f"p{seed}", [episode])
    if is_recorded:
        state.reports.mkdir()
        (state.reports / "suite-my-own-0a.html").write_text("")
    (name,) = read_evaluation_names(state).values()
    assert (name.key, name.began_at) == ("0a", 1e9)
    assert name.words == f"{'my-own' if is_recorded else 'mine'} · 2 seeds · T 0.6"
