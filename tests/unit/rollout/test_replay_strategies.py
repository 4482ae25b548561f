"""Strategies of replay: the weights of each against values computed by hand, and draws that follow the weights."""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from replay_samples import failed_group, group_of, make_row, rollout, write_rows

from osworld_pipeline.domain.group import RolloutGroup
from osworld_pipeline.domain.replay import Injection, ReplayRow
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.domain.trajectory import Trajectory
from osworld_pipeline.recipes.schema import ReplaySection
from osworld_pipeline.rollout.replay import ReplayBuffer
from osworld_pipeline.rollout.replay_strategies import (
    DIVERSE_FLOOR,
    _distance,
    _transitions,
    failure_priority,
    row_weights,
    weighted_order,
)
from osworld_pipeline.store import TrajectoryStore
from osworld_pipeline.tables.replay.candidates import RecentGroups, ReplayCandidate

NUM_DRAWS = 3000
CRITICAL = {1: 15.1, 2: 18.4, 3: 21.1, 5: 25.7}
"""Chi-square above which a right sampler gets once in ten thousand times, by degrees of freedom."""


def candidate(row_id: str, **changes) -> ReplayCandidate:
    fields: dict[str, Any] = {
        "row_id": row_id,
        "kind": "demonstration",
        "task_id": "t",
        "original_task_id": "t",
        "source_dataset": "sft_clean",
        "quality_rank": 1,
        "reward": 1.0,
        "verified_reward": None,
        "num_steps": 4,
        "action_types": (),
        "recorded_at": None,
        "place": 1,
    }
    return ReplayCandidate(**fields | changes)


def chi_square(counts: Mapping[str, int], shares: Mapping[str, float]) -> float:
    total = sum(counts.values())
    return sum((counts.get(name, 0) - total * share) ** 2 / (total * share) for name, share in shares.items())


def first_draws(items: Sequence[str], weights: Sequence[float]) -> Counter[str]:
    return Counter(weighted_order(items, weights, random.Random(seed))[0] for seed in range(NUM_DRAWS))


def test_a_draw_is_in_proportion_to_the_weights() -> None:
    counts = first_draws("abc", [1.0, 2.0, 5.0])
    assert chi_square(counts, {"a": 1 / 8, "b": 2 / 8, "c": 5 / 8}) < CRITICAL[2]
    assert chi_square(counts, dict.fromkeys("abc", 1 / 3)) > CRITICAL[2], "the test can tell other weights apart"


def test_the_next_draws_are_in_proportion_to_the_weights_that_are_left() -> None:
    weights = {"a": 1.0, "b": 2.0, "c": 5.0}
    orders = Counter("".join(weighted_order("abc", [1.0, 2.0, 5.0], random.Random(seed))) for seed in range(NUM_DRAWS))
    shares = {
        first + second + third: weights[first] / 8 * weights[second] / (8 - weights[first])
        for first, second, third in permutations("abc")
    }
    assert chi_square(orders, shares) < CRITICAL[5]


def test_uniform_gives_every_row_the_same_chance() -> None:
    rows = [candidate("a", num_steps=1), candidate("b", num_steps=9), candidate("c", quality_rank=5)]
    assert row_weights("uniform", rows) == row_weights("recent_failure", rows) == (1.0, 1.0, 1.0)


def test_newest_halves_the_chance_from_rank_to_rank_and_demonstrations_are_the_oldest() -> None:
    rows = [
        candidate("plain", place=2),
        candidate("older", kind="episode", recorded_at=10.0, quality_rank=None),
        candidate("curated", quality_rank=5, place=1),
        candidate("newer", kind="episode", recorded_at=20.0, quality_rank=None),
    ]
    assert row_weights("newest", rows) == (1 / 8, 1 / 2, 1 / 4, 1.0)


def test_weights_of_newest_stay_positive_for_any_number_of_rows() -> None:
    assert min(row_weights("newest", [candidate(str(index), place=index) for index in range(2000)])) > 0


def test_shortest_gives_a_row_of_twice_the_length_a_quarter_of_the_chance() -> None:
    rows = [candidate("long", num_steps=8), candidate("short", num_steps=4), candidate("longer", num_steps=12)]
    assert row_weights("shortest", rows) == pytest.approx((1 / 4, 1.0, 1 / 9))
    assert row_weights("shortest", [candidate("empty", num_steps=0)]) == (1.0,)


def test_distance_of_action_sequences_is_the_share_of_transitions_not_in_common() -> None:
    def distance(first: tuple[str, ...], second: tuple[str, ...]) -> float:
        return _distance(_transitions(first), _transitions(second))

    assert distance(("click", "type"), ("click", "type")) == 0.0
    # begin-click, click-end against begin-key, key-end.
    assert distance(("click",), ("key",)) == 1.0
    # begin-click, click-type, type-end against begin-click, click-end: one of four in common.
    assert distance(("click", "type"), ("click",)) == pytest.approx(3 / 4)
    assert distance((), ()) == 0.0


def test_diverse_prefers_rows_far_from_those_injected_before() -> None:
    rows = [
        candidate("used", action_types=("click",)),
        candidate("alike", action_types=("click",)),
        candidate("near", action_types=("click", "type")),
        candidate("far", action_types=("key",)),
    ]
    weights = row_weights("diverse", rows, injected={"used", "of another task"})
    assert weights == pytest.approx([DIVERSE_FLOOR + distance for distance in (0.0, 0.0, 0.75, 1.0)])


def test_diverse_prefers_the_row_farthest_from_the_others_where_none_was_injected() -> None:
    rows = [candidate(name, action_types=(kind,)) for name, kind in (("a", "click"), ("b", "click"), ("c", "key"))]
    assert row_weights("diverse", rows) == pytest.approx([DIVERSE_FLOOR + share for share in (0.5, 0.5, 1.0)])
    assert row_weights("diverse", rows[:1]) == (DIVERSE_FLOOR,)


def test_an_unknown_strategy_is_refused() -> None:
    with pytest.raises(ValueError, match="no replay strategy named 'best'"):
        row_weights("best", [candidate("a")])


def test_priority_grows_with_failures_and_is_even_for_an_unknown_task() -> None:
    assert failure_priority(RecentGroups()) == 0.5
    assert failure_priority(RecentGroups(num_groups=8, num_failed=8)) == pytest.approx(0.9)
    assert failure_priority(RecentGroups(num_groups=8, num_failed=0)) == pytest.approx(0.1)


def plain(group: RolloutGroup, row: ReplayRow) -> list[Trajectory]:
    return [Trajectory(trajectory_id=row.row_id, task_id=row.task_id, token_ids=(1,), response_mask=(1,), images=())]


def served_rows(state: StateDir, num_groups: int = 900, **section) -> Counter[str]:
    groups = [failed_group(group_id=f"g{index}") for index in range(num_groups)]
    with ReplayBuffer(state, ReplaySection(**section), stage_key="stage") as buffer:
        served = buffer.serve(groups, update=5, render=plain)
    return Counter(one.row.row_id for one in served.groups.values())


def test_the_buffer_draws_uniform_and_shortest_as_they_are_defined(tmp_path: Path) -> None:
    rows = [make_row("a", num_steps=2), make_row("b", num_steps=4), make_row("c", num_steps=6)]
    state = write_rows(StateDir(tmp_path), *rows)
    assert chi_square(served_rows(state), dict.fromkeys("abc", 1 / 3)) < CRITICAL[2]
    total = 1 + 1 / 4 + 1 / 9
    shortest = {"a": 1 / total, "b": 1 / 4 / total, "c": 1 / 9 / total}
    assert chi_square(served_rows(state, strategy="shortest"), shortest) < CRITICAL[2]


def test_the_buffer_draws_newest_by_when_successes_were_recorded(tmp_path: Path) -> None:
    state = write_rows(StateDir(tmp_path), make_row("demo"))
    store = TrajectoryStore(state)
    store.write_episodes("stage-u0000", [rollout("e0", 1.0, started_at=10.0)])
    store.write_episodes("stage-u0001", [rollout("e1", 1.0, started_at=20.0, update=1)])
    counts = served_rows(state, strategy="newest", include_online=True)
    assert chi_square(counts, {"e1": 4 / 7, "e0": 2 / 7, "demo": 1 / 7}) < CRITICAL[2]


def test_the_buffer_draws_diverse_away_from_what_it_injected(tmp_path: Path) -> None:
    state = write_rows(
        StateDir(tmp_path),
        make_row("used", action_types=["click"]),
        make_row("alike", action_types=["click"]),
        make_row("far", action_types=["key", "wait"]),
    )
    joined = group_of(rollout("e"), group_id="before")
    injection = Injection(
        injection_id="i",
        group_id="before",
        row_id="used",
        task_id="t",
        source_dataset="sft_clean",
        reward=1.0,
        advantage=1.0,
        weight=1.0,
    )
    TrajectoryStore(state).write_groups("stage-u0000", [joined], [injection])
    total = 3 * DIVERSE_FLOOR + 1
    shares = {"used": DIVERSE_FLOOR / total, "alike": DIVERSE_FLOOR / total, "far": (DIVERSE_FLOOR + 1) / total}
    assert chi_square(served_rows(state, strategy="diverse"), shares) < CRITICAL[2]


def test_recent_failure_serves_the_task_that_failed_most_first(tmp_path: Path) -> None:
    state = write_rows(StateDir(tmp_path), make_row("a", "hard"), make_row("b", "easy"), make_row("c", "new"))
    store = TrajectoryStore(state)
    for update in range(10):
        groups = [
            group_of(
                rollout(f"{task}{update}", reward, task_id=task, update=update),
                group_id=f"{task}{update}",
                task_id=task,
                update=update,
            )
            for task, reward in (("hard", 0.0), ("easy", 1.0 if update >= 2 else 0.0), ("new", None))
        ]
        store.write_groups(f"stage-u{update:04d}", groups, [])
    groups = [failed_group(task, group_id=f"{task}{n}") for task in ("hard", "easy", "new") for n in range(1000)]
    section = ReplaySection(strategy="recent_failure", max_injections=120)
    with ReplayBuffer(state, section, stage_key="stage") as buffer:
        served = buffer.serve(groups, update=10, render=plain)
    counts = Counter(one.row.task_id for one in served.groups.values())
    # Of the last eight groups the one task failed in all, the other in none; the third met only faults. So many groups
    # wait that the few served change the shares of those left by little.
    assert chi_square(counts, {"hard": 0.9 / 1.5, "easy": 0.1 / 1.5, "new": 0.5 / 1.5}) < CRITICAL[2]
    assert chi_square(counts, dict.fromkeys(("hard", "easy", "new"), 1 / 3)) > CRITICAL[2]
