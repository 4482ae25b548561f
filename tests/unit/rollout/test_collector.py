"""The synchronous collector: every status is recorded, other tasks replace those without signal, and a rerun has the
same groups."""

import asyncio
from collections.abc import Callable, Mapping, Sequence

import pytest
from group_samples import BuilderByRewards, make_ended, make_group, make_tasks

from osworld_pipeline.domain.episode import Episode, Outcome
from osworld_pipeline.domain.group import GroupStatus, RolloutGroup
from osworld_pipeline.domain.task import Task
from osworld_pipeline.errors import EngineError, EnvServerError, StoreError
from osworld_pipeline.recipes.schema import RolloutSection
from osworld_pipeline.rollout.batch import GspoBatch
from osworld_pipeline.rollout.collector import FaultWatch, RunGroup, SynchronousCollector
from osworld_pipeline.rollout.task_sampling import RoundRobin

Ends = Callable[[str, Task], Sequence[Episode]]
TASKS = make_tasks(6)


def differing(group_id: str, task: Task) -> list[Episode]:
    return [make_ended(f"{group_id}-s{index}", shaped=0.5 * index) for index in range(2)]


def equal(group_id: str, task: Task) -> list[Episode]:
    return [make_ended(f"{group_id}-s{index}", outcome=Outcome.SUCCESS, shaped=1.0) for index in range(2)]


def faulty(group_id: str, task: Task) -> list[Episode]:
    return [make_ended(f"{group_id}-s{index}", outcome=Outcome.ENV_FAULT) for index in range(2)]


def groups_that(ends: Mapping[str, Ends], ran: list[tuple[str, str]]) -> RunGroup:
    """A group of a task in `ends` ends as given there; all others have a difference in rewards."""

    async def run(task: Task, group_id: str, update: int) -> RolloutGroup:
        ran.append((group_id, task.task_id))
        await asyncio.sleep(0)
        return make_group(group_id, task, update, ends.get(task.task_id, differing)(group_id, task))

    return run


def collector_of(run_group: RunGroup, **section: object) -> SynchronousCollector:
    return SynchronousCollector(
        run_group,
        BuilderByRewards(),
        RoundRobin(TASKS, seed="x", tasks_per_update=2),
        stage_key="s",
        section=RolloutSection.model_validate(section),
        groups_per_update=2,
    )


def order_of(update: int, count: int) -> list[str]:
    """Ids of the tasks of this update, followed by those that would replace another task."""
    tasks = RoundRobin(TASKS, seed="x", tasks_per_update=2).tasks_of(update)
    return [next(tasks).task_id for _ in range(count)]


def statuses(batch: GspoBatch) -> list[str]:
    return [str(group.status) for group in batch.groups]


async def test_names_and_tasks_of_an_updates_groups_depend_only_on_the_plan() -> None:
    runs: list[list[tuple[str, str]]] = [[], []]
    for ran in runs:
        async with collector_of(groups_that({}, ran)) as collector:
            batches = [await collector.collect(update) for update in range(3)]
    assert runs[0] == runs[1]
    assert [group_id for group_id, _ in runs[0]] == [
        f"s-u{update:04d}-g{index:02d}" for update in range(3) for index in range(2)
    ]
    assert sorted(task for _, task in runs[0]) == sorted(task.task_id for task in TASKS)
    assert [len(batch.trajectories) for batch in batches] == [4, 4, 4]


async def test_a_group_without_signal_is_skipped_and_recorded() -> None:
    first, second = order_of(0, 2)
    ran: list[tuple[str, str]] = []
    batch = await collector_of(groups_that({first: equal, second: faulty}, ran)).collect(0)
    assert statuses(batch) == ["zero_variance", "too_few_valid"]
    assert [group.reason for group in batch.groups] == ["so", "so"]
    assert (len(ran), batch.trajectories) == (2, ())
    assert batch.num_groups(GroupStatus.ZERO_VARIANCE) == 1


async def test_a_group_of_another_task_replaces_a_group_without_signal() -> None:
    first, _, third, _ = order_of(0, 4)
    ran: list[tuple[str, str]] = []
    batch = await collector_of(groups_that({first: equal, third: faulty}, ran), zero_variance="top_up").collect(0)
    assert [task for _, task in ran] == order_of(0, 4), "no task comes twice while there are others"
    assert [group_id for group_id, _ in ran] == [f"s-u0000-g{index:02d}" for index in range(4)]
    assert statuses(batch) == ["zero_variance", "trained", "too_few_valid", "trained"]
    assert len(batch.trajectories) == 4


async def test_top_ups_end_at_their_limit() -> None:
    ran: list[tuple[str, str]] = []
    ends = {task.task_id: equal for task in TASKS}
    batch = await collector_of(groups_that(ends, ran), zero_variance="top_up", max_top_ups=3).collect(1)
    assert statuses(batch) == ["zero_variance"] * 5
    assert batch.trajectories == ()


async def test_with_more_top_ups_than_tasks_the_tasks_are_tried_again() -> None:
    ran: list[tuple[str, str]] = []
    ends = {task.task_id: equal for task in TASKS}
    await collector_of(groups_that(ends, ran), zero_variance="top_up", max_top_ups=8).collect(0)
    assert len(ran) == len({group_id for group_id, _ in ran}) == 10
    assert {task for _, task in ran[:6]} == {task.task_id for task in TASKS}


async def test_an_error_ends_the_collection_and_leaves_no_group_running() -> None:
    started: list[str] = []

    async def run(task: Task, group_id: str, update: int) -> RolloutGroup:
        started.append(group_id)
        if len(started) == 2:
            raise StoreError("no disk space left")
        await asyncio.sleep(60)
        raise AssertionError("it was not cancelled")

    with pytest.raises(StoreError, match="no disk space left"):
        await collector_of(run).collect(0)
    assert len(asyncio.all_tasks()) == 1


async def test_an_update_that_will_be_held_is_not_topped_up_and_runs_the_same_groups_again() -> None:
    ran: list[tuple[str, str]] = []
    ends = {task.task_id: faulty for task in TASKS}
    builder = BuilderByRewards()
    collector = SynchronousCollector(
        groups_that(ends, ran),
        builder,
        RoundRobin(TASKS, seed="x", tasks_per_update=2),
        stage_key="s",
        section=RolloutSection(zero_variance="top_up", max_fault_share=0.9),
        groups_per_update=2,
    )
    first = await collector.collect(0)
    assert statuses(first) == ["too_few_valid"] * 2
    assert await collector.hold(first, update=0) is first
    assert (await collector.resume(0)).groups == ()
    ends.clear()
    again = await collector.collect(0)
    assert [group.group_id for group in again.groups] == [group.group_id for group in first.groups]
    assert [group.task_id for group in again.groups] == [group.task_id for group in first.groups]
    assert builder.given_back == [(0, 0)]


def test_a_series_of_only_faults_ends_the_run_and_the_error_says_which_side_is_down() -> None:
    watch = FaultWatch(3)
    for outcome in (Outcome.POLICY_FAULT, Outcome.POLICY_FAULT, Outcome.SUCCESS, Outcome.ENV_FAULT, Outcome.ENV_FAULT):
        watch(make_ended(outcome=outcome))
    with pytest.raises(EnvServerError, match="all 3 episodes ended in an env_fault"):
        watch(make_ended(outcome=Outcome.ENV_FAULT))
    watch = FaultWatch(2)
    watch(make_ended(outcome=Outcome.POLICY_FAULT))
    with pytest.raises(EngineError, match="all 2 episodes ended in a policy_fault"):
        watch(make_ended(outcome=Outcome.POLICY_FAULT))


def test_a_grader_that_faults_and_a_slow_policy_do_not_end_the_run() -> None:
    watch = FaultWatch(2)
    for _ in range(4):
        watch(make_ended(outcome=Outcome.GRADER_FAULT))
        watch(make_ended(outcome=Outcome.TIMEOUT))


def test_faults_of_services_that_have_worked_do_not_end_a_run_whose_updates_can_be_held() -> None:
    watch = FaultWatch(2, can_hold=True)
    watch(make_ended(outcome=Outcome.ENV_FAULT))
    watch(make_ended(outcome=Outcome.FAILURE))
    for _ in range(4):
        watch(make_ended(outcome=Outcome.ENV_FAULT))
    never_worked = FaultWatch(2, can_hold=True)
    never_worked(make_ended(outcome=Outcome.TIMEOUT))
    never_worked(make_ended(outcome=Outcome.ENV_FAULT))
    with pytest.raises(EnvServerError, match="all 2 episodes ended in an env_fault"):
        never_worked(make_ended(outcome=Outcome.ENV_FAULT))
