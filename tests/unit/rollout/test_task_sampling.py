"""The choice of the next task: each once before any repeats, or in proportion to what it teaches; always by seed."""

import itertools
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from group_samples import make_ended, make_group, make_tasks

from osworld_pipeline.domain.checkpoint import Ancestor
from osworld_pipeline.domain.episode import Outcome
from osworld_pipeline.domain.group import GroupStatus
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import TableError
from osworld_pipeline.recipes.schema import RolloutSection
from osworld_pipeline.rollout.task_sampling import Curriculum, RoundRobin, open_task_sampler, task_weight
from osworld_pipeline.store import TrajectoryStore
from osworld_pipeline.tables.replay.recent_success import RecentEpisodes, recent_success

TASKS = make_tasks(7)
ALL = {task.task_id for task in TASKS}


def recent(successes: int, valid: int = 8) -> RecentEpisodes:
    return RecentEpisodes(num_valid=valid, num_successes=successes)


def test_every_task_is_drawn_once_before_any_is_repeated() -> None:
    sampler = RoundRobin(TASKS, seed="x", tasks_per_update=3)
    drawn = [task.task_id for update in range(7) for task in itertools.islice(sampler.tasks_of(update), 3)]
    assert set(drawn[:7]) == ALL
    assert set(Counter(drawn).values()) == {3}
    assert drawn[:3] == [task.task_id for task in itertools.islice(sampler.tasks_of(0), 3)], "a rerun draws the same"
    assert drawn == [sampler.task_of(serial).task_id for serial in range(21)]
    other = RoundRobin(TASKS, seed="y", tasks_per_update=3)
    assert drawn != [other.task_of(serial).task_id for serial in range(21)]


def test_every_update_draws_each_domain_in_proportion_to_its_tasks() -> None:
    tasks = [replace(task, domain="os" if index < 20 else "chrome") for index, task in enumerate(make_tasks(60))]
    for seed in range(20):
        sampler = RoundRobin(tasks, seed=str(seed), tasks_per_update=6)
        for update in range(10):
            domains = Counter(task.domain for task in itertools.islice(sampler.tasks_of(update), 6))
            assert 1 <= domains["os"] <= 3, "a third of the tasks: two of six, one more or less"


def test_a_replacement_task_is_one_that_the_update_does_not_have_yet() -> None:
    for update in range(10):
        sampler = RoundRobin(TASKS, seed="x", tasks_per_update=3)
        drawn = [task.task_id for task in itertools.islice(sampler.tasks_of(update), 9)]
        planned, missing = drawn[:3], ALL - set(drawn[:3])
        assert planned == [sampler.task_of(serial).task_id for serial in range(3 * update, 3 * update + 3)]
        assert set(drawn[3 : 3 + len(missing)]) == missing


def test_a_sampler_without_tasks_is_an_error_at_once() -> None:
    with pytest.raises(TableError, match="there are no tasks"):
        RoundRobin([], seed="x", tasks_per_update=3)


def test_weight_is_one_at_the_target_and_the_floor_where_nothing_is_left_to_learn() -> None:
    assert task_weight(RecentEpisodes(), target=0.3, floor=0.1) == pytest.approx(1.0)
    # (4 + 1) / (8 + 2) = 0.5, on target.
    assert task_weight(recent(4), target=0.5, floor=0.1) == pytest.approx(1.0)
    # (8 + 1) / (8 + 2) = 0.9: 1 - 0.4 / 0.5 = 0.2.
    assert task_weight(recent(8), target=0.5, floor=0.1) == pytest.approx(0.2)
    # (800 + 1) / (800 + 2) is nearly 1: nothing above the floor is left.
    assert task_weight(recent(800, 800), target=0.5, floor=0.1) == 0.1
    # (0 + 0.4) / (8 + 2) = 0.04 with target 0.2: 1 - 0.16 / 0.8 = 0.8.
    assert task_weight(recent(0), target=0.2, floor=0.1) == pytest.approx(0.8)


def test_tasks_near_the_target_are_drawn_more_often_and_all_others_are_still_drawn() -> None:
    rates = {"t0": recent(100, 100), "t1": recent(50, 100), "t2": recent(0, 100)}
    sampler = Curriculum(TASKS[:3], seed="x", target=0.5, floor=0.1, read_recent=lambda update: rates)
    sampler.look(1)
    drawn = Counter(sampler.task_of(serial).task_id for serial in range(1200))
    # Weights 0.1, 1, 0.1: the shares are 1/12, 10/12, 1/12.
    assert 900 < drawn["t1"] < 1080
    assert 50 < drawn["t0"] < 160
    assert 50 < drawn["t2"] < 160
    firsts = Counter(next(sampler.tasks_of(update)).task_id for update in range(600))
    assert firsts["t1"] > 400
    assert {task.task_id for task in itertools.islice(sampler.tasks_of(3), 3)} == {"t0", "t1", "t2"}


def test_a_curriculum_draws_the_same_tasks_from_the_same_record() -> None:
    asked: list[int] = []

    def read(update: int) -> dict[str, RecentEpisodes]:
        asked.append(update)
        return {"t1": recent(update)}

    section = RolloutSection(task_sampling="curriculum")
    drawn = []
    for _ in range(2):
        sampler = open_task_sampler(TASKS, section, seed="x", tasks_per_update=3, read_recent=read)
        sampler.look(5)
        drawn.append([task.task_id for task in itertools.islice(sampler.tasks_of(5), 20)])
    assert drawn[0] == drawn[1]
    assert asked == [5, 5]


def test_recent_success_counts_the_last_groups_of_the_stage_and_of_those_before_it(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    store = TrajectoryStore(state)
    task = TASKS[0]

    def write(stage: str, update: int, outcomes: list[Outcome]) -> None:
        episodes = [make_ended(f"{stage}-{update}-{n}", outcome=outcome) for n, outcome in enumerate(outcomes)]
        group = make_group(f"{stage}-u{update:04d}-g00", task, update, episodes)
        group = type(group)(**{**vars(group), "stage_key": stage})
        store.write_groups(f"{stage}-u{update:04d}", [group], [])

    success, failure, fault = Outcome.SUCCESS, Outcome.FAILURE, Outcome.ENV_FAULT
    write("parent", 9, [success, success, success, success])
    write("mine", 0, [failure, fault])
    write("mine", 1, [success, failure])
    write("mine", 2, [success, success])
    write("other", 0, [success] * 8)

    def rates(update: int, num_groups: int) -> RecentEpisodes:
        found = recent_success(
            state, stage_key="mine", lineage=[Ancestor("parent")], update=update, num_groups=num_groups
        )
        assert set(found) == {"t0"}
        return found["t0"]

    assert rates(2, 8) == recent(5, 7), "an update sees those before it, and no other stage's"
    assert rates(2, 1) == recent(1, 2), "the newest first"
    assert rates(0, 8) == recent(4, 4)
    assert rates(9, 2) == recent(3, 4)
    assert recent_success(state, stage_key="new", lineage=[], update=5, num_groups=8) == {}


def test_a_held_group_does_not_count_in_the_recent_success_of_its_task(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    groups = []
    for name, status, outcome in (
        ("g0", GroupStatus.TRAINED, Outcome.FAILURE),
        ("g1", GroupStatus.HELD, Outcome.SUCCESS),
    ):
        group = make_group(name, TASKS[0], 0, [make_ended(f"{name}-s0", outcome=outcome)])
        groups.append(replace(group, stage_key="mine", status=status))
    TrajectoryStore(state).write_groups("mine-u0000", groups, [])
    found = recent_success(state, stage_key="mine", lineage=[], update=1, num_groups=8)
    assert found == {"t0": recent(0, 1)}


def test_recent_success_of_a_parent_ends_at_the_milestone_that_training_continues_from(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    for update, outcome in enumerate((Outcome.SUCCESS, Outcome.FAILURE, Outcome.SUCCESS)):
        group = make_group(f"parent-u{update:04d}-g00", TASKS[0], update, [make_ended(f"e{update}", outcome=outcome)])
        group = type(group)(**{**vars(group), "stage_key": "parent"})
        TrajectoryStore(state).write_groups(f"parent-u{update:04d}", [group], [])

    def rates(stage_key: str, *lineage: str, update: int = 0) -> RecentEpisodes:
        ancestors = [Ancestor.parse(name) for name in lineage]
        return recent_success(state, stage_key=stage_key, lineage=ancestors, update=update, num_groups=8)["t0"]

    assert rates("mine", "parent-u0002") == recent(1, 2), "what came after the milestone is another line"
    assert rates("mine", "parent") == recent(2, 3)
    assert rates("mine", "parent-u0001", "parent-u0003") == recent(1, 1), "the nearest word holds"
    assert rates("parent", "parent-u0001", update=2) == recent(1, 2), "one that goes on from its own milestone"
