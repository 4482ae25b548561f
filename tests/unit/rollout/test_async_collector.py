"""The asynchronous collector: no token older than the bound is trained on, for any latencies. Every group has one
status and one name. Groups that were not trained on are rolled out again after a kill."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from group_samples import BuilderByRewards, make_ended, make_group, make_tasks
from hypothesis import given, settings
from hypothesis import strategies as st

from osworld_pipeline.domain.episode import Outcome
from osworld_pipeline.domain.group import GroupStatus, RolloutGroup
from osworld_pipeline.domain.replay import Injection
from osworld_pipeline.domain.task import Task
from osworld_pipeline.errors import EngineError, StoreError
from osworld_pipeline.recipes.schema import RolloutSection
from osworld_pipeline.rollout.async_collector import AsynchronousCollector
from osworld_pipeline.rollout.batch import GspoBatch
from osworld_pipeline.rollout.collector import RunGroup
from osworld_pipeline.rollout.task_sampling import RoundRobin

TASKS = make_tasks(5)
NUM_TURNS = 3


class World:
    """Groups whose turns take some time. A turn is sampled with the weights that are loaded when it starts."""

    def __init__(self, latency: Callable[[], float] = lambda: 0.0, *, equal: frozenset[int] = frozenset()) -> None:
        self.version = 0
        self.begun: list[str] = []
        self.begun_at: dict[str, int] = {}
        self._latency = latency
        self._equal = equal

    async def run_group(self, task: Task, group_id: str, update: int) -> RolloutGroup:
        self.begun.append(group_id)
        self.begun_at[group_id] = self.version
        versions = []
        for _ in range(NUM_TURNS):
            versions.append(self.version)
            await asyncio.sleep(self._latency())
        is_equal = int(group_id.removeprefix("s-g")) in self._equal
        rewards = (1.0, 1.0) if is_equal else (0.0, 1.0)
        episodes = [
            make_ended(f"{group_id}-s{index}", shaped=shaped, versions=versions) for index, shaped in enumerate(rewards)
        ]
        return make_group(group_id, task, update, episodes)


class InjectingBuilder(BuilderByRewards):
    """A replay row joins every group."""

    def __call__(self, groups: Sequence[RolloutGroup], *, update: int) -> GspoBatch:
        row = Injection(
            injection_id="i", group_id="g", row_id="r", task_id="t", source_dataset="d", reward=1, advantage=1, weight=1
        )
        return replace(super().__call__(groups, update=update), injections=(row,) * len(groups))


def collector_of(
    run_group: RunGroup,
    *,
    num_updates: int = 6,
    first_update: int = 0,
    resumed: Mapping[str, Any] | None = None,
    **section: object,
) -> AsynchronousCollector:
    return AsynchronousCollector(
        run_group,
        BuilderByRewards(),
        RoundRobin(TASKS, seed="x", tasks_per_update=2),
        stage_key="s",
        section=RolloutSection.model_validate({"mode": "asynchronous", **section}),
        groups_per_update=2,
        num_updates=num_updates,
        first_update=first_update,
        resumed=resumed,
    )


async def train(
    world: World,
    collector: AsynchronousCollector,
    updates: range,
    train_s: Callable[[], float] = lambda: 0.0,
    handover_s: Callable[[], float] | None = None,
) -> list[GspoBatch]:
    """`handover_s`: how long new weights take to arrive while the next update is collected; None: no overlap."""

    async def hand_over(update: int) -> None:
        await asyncio.sleep(0.0 if handover_s is None else handover_s())
        world.version = update
        await collector.advance(update)

    batches, handover = [], None
    async with collector:
        for update in updates:
            batches.append(await collector.collect(update))
            if handover is not None:
                await handover
            await asyncio.sleep(train_s())
            if update + 1 in updates:
                handover = asyncio.create_task(hand_over(update + 1))
                if handover_s is None:
                    await handover
    return batches


@given(seed=st.integers(0, 2**32), max_staleness=st.integers(0, 3), is_overlapped=st.booleans())
@settings(max_examples=40, deadline=None)
def test_no_token_older_than_the_bound_is_trained_on_for_any_latencies(
    seed: int, max_staleness: int, is_overlapped: bool
) -> None:
    rng = random.Random(seed)
    world = World(lambda: rng.choice([0.0, 0.0, 0.001, 0.004, 0.012]))
    collector = collector_of(world.run_group, max_staleness=max_staleness)
    handover_s = (lambda: rng.choice([0.0, 0.001, 0.008])) if is_overlapped else None
    batches = asyncio.run(train(world, collector, range(6), lambda: rng.choice([0.0, 0.002]), handover_s))
    for update, batch in enumerate(batches):
        assert batch.num_groups(GroupStatus.TRAINED) == 2, "every update has its groups, stale ones replaced"
        for trajectory in batch.trajectories:
            sampled = [version for version in trajectory.policy_versions or () if version >= 0]
            assert update - max_staleness <= min(sampled) <= max(sampled) <= update
        for group in batch.groups:
            assert group.update == update
            assert all(episode.update == update for episode in group.episodes)
            if group.status is GroupStatus.STALE:
                assert "updates old, rollout.max_staleness is" in group.reason
    recorded = Counter(group.group_id for batch in batches for group in batch.groups)
    assert recorded == Counter(world.begun), "every group that was begun has one status, and no second one"
    for group_id, version in world.begun_at.items():
        older = sum(other <= version for other in world.begun_at.values())
        num_stale = sum(batch.num_groups(GroupStatus.STALE) for batch in batches)
        assert older <= (version + max_staleness + 1) * 2 + num_stale, group_id


async def test_rollouts_continue_while_the_trainer_updates() -> None:
    world = World(lambda: 0.002)
    collector = collector_of(world.run_group, max_staleness=1)
    async with collector:
        await collector.collect(0)
        begun = len(world.begun)
        await asyncio.sleep(0.05)
        assert begun == len(world.begun) == 4, "one update ahead and no further"
        world.version = 1
        await collector.advance(1)
        await asyncio.sleep(0)
        assert len(world.begun) == 6
        batch = await collector.collect(1)
    assert [group.oldest_policy_version for group in batch.groups] == [0, 0]


async def test_a_bound_of_zero_waits_for_the_newest_weights() -> None:
    world = World()
    collector = collector_of(world.run_group, max_staleness=0)
    batches = await train(world, collector, range(6))
    assert [group.oldest_policy_version for batch in batches for group in batch.groups] == [
        update for update in range(6) for _ in range(2)
    ]
    assert [group.group_id for batch in batches for group in batch.groups] == [f"s-g{n:06d}" for n in range(12)]


async def test_a_group_that_others_overtook_for_too_long_is_dropped_as_stale_and_replaced() -> None:
    world, slow = World(), asyncio.Event()

    async def run(task: Task, group_id: str, update: int) -> RolloutGroup:
        group = await world.run_group(task, group_id, update)
        if group_id == "s-g000000":
            await slow.wait()
        return group

    collector = collector_of(run, max_staleness=1)
    async with collector:
        batches = []
        for update in range(6):
            if update == 4:
                slow.set()
                await asyncio.sleep(0.02)
            batches.append(await collector.collect(update))
            world.version = update + 1
            if update < 5:
                await collector.advance(update + 1)
    stale = [group for batch in batches for group in batch.groups if group.status is GroupStatus.STALE]
    assert [(group.group_id, group.update, group.replay) for group in stale] == [("s-g000000", 4, None)]
    assert stale[0].reason == "its oldest token is 4 updates old, rollout.max_staleness is 1"
    assert [batch.num_groups(GroupStatus.TRAINED) for batch in batches] == [2] * 6


async def test_groups_without_signal_count_if_they_are_skipped_and_are_replaced_if_they_are_topped_up() -> None:
    equal = frozenset({1, 2, 3})
    skipping = World(equal=equal)
    batches = await train(skipping, collector_of(skipping.run_group, num_updates=3), range(3))
    assert len(skipping.begun) == 6
    assert sum(len(batch.trajectories) for batch in batches) == 6
    topping = World(equal=equal)
    collector = collector_of(topping.run_group, num_updates=3, zero_variance="top_up")
    batches = await train(topping, collector, range(3))
    assert len(topping.begun) == 9
    assert [batch.num_groups(GroupStatus.TRAINED) for batch in batches] == [2, 2, 2]
    assert sum(batch.num_groups(GroupStatus.ZERO_VARIANCE) for batch in batches) == 3


async def test_top_ups_of_an_update_have_a_limit() -> None:
    world = World(equal=frozenset(range(100)))
    collector = collector_of(world.run_group, num_updates=2, zero_variance="top_up", max_top_ups=1)
    batches = await train(world, collector, range(2))
    assert len(world.begun) <= 4 + 2
    assert all(not batch.trajectories for batch in batches)


async def test_a_killed_run_repeats_the_groups_that_it_had_not_trained_under_the_same_names() -> None:
    world = World(lambda: 0.001)
    collector = collector_of(world.run_group, max_staleness=2)
    async with collector:
        trained = {group.group_id for group in (await collector.collect(0)).groups}
        snapshot = collector.snapshot()
    begun = set(world.begun)
    assert set(snapshot["open"]) == {int(name.removeprefix("s-g")) for name in begun - trained}
    again = World(lambda: 0.001)
    again.version = 1
    resumed = collector_of(again.run_group, max_staleness=2, first_update=1, resumed=snapshot)
    batches = await train(again, resumed, range(1, 6))
    assert begun - trained <= set(again.begun), "none is forgotten"
    assert not trained & set(again.begun), "none is rolled out twice"
    assert sorted(trained | set(again.begun)) == [f"s-g{n:06d}" for n in range(12)]
    assert [batch.num_groups(GroupStatus.TRAINED) for batch in batches] == [2] * 5


async def test_an_error_ends_the_collection_and_nothing_is_left_running() -> None:
    async def run(task: Task, group_id: str, update: int) -> RolloutGroup:
        if group_id == "s-g000002":
            raise StoreError("no disk space left")
        await asyncio.sleep(60)
        raise AssertionError("it was not cancelled")

    with pytest.raises(StoreError, match="no disk space left"):
        async with collector_of(run) as collector:
            await collector.collect(0)
    assert len(asyncio.all_tasks()) == 1


async def test_an_engine_that_keeps_sampling_with_old_weights_ends_the_run() -> None:
    world = World()
    frozen = World()

    async def run(task: Task, group_id: str, update: int) -> RolloutGroup:
        return await frozen.run_group(task, group_id, update)

    with pytest.raises(
        EngineError, match=r"group s-g00000\d with the weights after 0 updates, although it had received those after 1"
    ):
        await train(world, collector_of(run), range(6))


async def test_faults_of_a_whole_group_are_recorded_and_do_not_count_as_a_reward() -> None:
    async def run(task: Task, group_id: str, update: int) -> RolloutGroup:
        outcome = Outcome.POLICY_FAULT if group_id == "s-g000000" else Outcome.FAILURE
        episodes = [make_ended(f"{group_id}-s{n}", outcome=outcome, shaped=0.1 * n) for n in range(2)]
        return make_group(group_id, task, update, episodes)

    async with collector_of(run, num_updates=1) as collector:
        batch = await collector.collect(0)
    assert [str(group.status) for group in batch.groups] == ["too_few_valid", "trained"]
    assert [trajectory.trajectory_id for trajectory in batch.trajectories] == ["s-g000001-s0", "s-g000001-s1"]


async def test_hundreds_of_episodes_are_in_flight_while_updates_are_trained() -> None:
    in_flight = most = 0

    async def run(task: Task, group_id: str, update: int) -> RolloutGroup:
        nonlocal in_flight, most
        in_flight += 8
        most = max(most, in_flight)
        await asyncio.sleep(0.05)
        in_flight -= 8
        return make_group(
            group_id, task, update, [make_ended(f"{group_id}-s{n}", shaped=n, versions=[update]) for n in range(8)]
        )

    collector = AsynchronousCollector(
        run,
        BuilderByRewards(),
        RoundRobin(TASKS, seed="x", tasks_per_update=20),
        stage_key="s",
        section=RolloutSection(mode="asynchronous", max_staleness=1),
        groups_per_update=20,
        num_updates=4,
    )
    async with collector:
        for update in range(4):
            batch = await collector.collect(update)
            assert len(batch.trajectories) == 160
            if update < 3:
                await collector.advance(update + 1)
    assert most == 320


def faults_of(group_id: str, task: Task, update: int) -> RolloutGroup:
    faults = [make_ended(f"{group_id}-s{n}", outcome=Outcome.ENV_FAULT) for n in range(2)]
    return make_group(group_id, task, update, faults)


async def until(holds: Callable[[], bool]) -> None:
    for _ in range(30_000):
        if holds():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it did not hold in 30 s")


async def test_a_held_update_discards_faulty_groups_and_keeps_the_other_and_the_running_groups() -> None:
    world, blocked = World(), asyncio.Event()
    is_down = True

    async def run(task: Task, group_id: str, update: int) -> RolloutGroup:
        number = int(group_id.removeprefix("s-g"))
        group = await world.run_group(task, group_id, update)
        if number in (4, 5) and is_down:
            await blocked.wait()
        return faults_of(group_id, task, update) if number in (0, 3, 4) and is_down else group

    collector = collector_of(run, num_updates=3, max_staleness=2, max_fault_share=0.4)
    async with collector:
        await until(lambda: (collector.num_waiting, collector.num_running) == (4, 2))
        batch = await collector.collect(0)
        assert [group.group_id for group in batch.groups] == ["s-g000000", "s-g000001"]
        discarded = await collector.hold(batch, update=0)
        assert [group.group_id for group in discarded.groups] == ["s-g000000", "s-g000003"]
        assert collector.num_running == 2
        assert collector.snapshot() == {"open": [0, 1, 2, 3, 4, 5], "next_serial": 6}
        blocked.set()
        await until(lambda: collector.num_running == 0)
        assert len(world.begun) == 6, "nothing starts before rollouts resume"
        is_down = False
        late = await collector.resume(0)
        assert [group.group_id for group in late.groups] == ["s-g000004"], "it ended in the pause"
        assert [group.group_id for group in (await collector.collect(0)).groups] == ["s-g000001", "s-g000002"]
        await until(lambda: len(world.begun) == 9)
        assert sorted(world.begun[6:]) == [f"s-g{number:06d}" for number in (0, 3, 4)]


async def test_an_error_ends_a_held_update_before_its_pause() -> None:
    broken = asyncio.Event()

    async def run(task: Task, group_id: str, update: int) -> RolloutGroup:
        if group_id == "s-g000002":
            await broken.wait()
            raise StoreError("no disk space left")
        return faults_of(group_id, task, update)

    async with collector_of(run, num_updates=2, max_fault_share=0.3) as collector:
        batch = await collector.collect(0)
        broken.set()
        await until(lambda: collector.num_running == 0)
        with pytest.raises(StoreError, match="no disk space left"):
            await collector.hold(batch, update=0)


async def test_dropped_groups_of_a_held_update_are_counted_once() -> None:
    """A group without signal was replaced before the hold. It is dropped once, and its replacement is kept."""
    world = World(equal=frozenset({1}))
    is_down = True

    async def run(task: Task, group_id: str, update: int) -> RolloutGroup:
        group = await world.run_group(task, group_id, update)
        if group_id == "s-g000000" and is_down:
            await asyncio.sleep(0.01)
            return faults_of(group_id, task, update)
        return group

    collector = collector_of(run, num_updates=1, max_staleness=0, zero_variance="top_up", max_fault_share=0.3)
    async with collector:
        batch = await collector.collect(0)
        assert {group.group_id: str(group.status) for group in batch.groups} == {
            "s-g000000": "too_few_valid",
            "s-g000001": "zero_variance",
            "s-g000002": "trained",
        }
        discarded = await collector.hold(batch, update=0)
        assert [group.group_id for group in discarded.groups] == ["s-g000000"]
        is_down = False
        assert (await collector.resume(0)).groups == ()
        again = await collector.collect(0)
    assert {group.group_id: str(group.status) for group in again.groups} == {
        "s-g000000": "trained",
        "s-g000001": "zero_variance",
        "s-g000002": "trained",
    }
    assert Counter(world.begun) == {"s-g000000": 2, "s-g000001": 1, "s-g000002": 1}


@given(seed=st.integers(0, 2**32), max_staleness=st.integers(0, 3), is_overlapped=st.booleans())
@settings(max_examples=40, deadline=None)
def test_with_any_faults_and_holds_each_group_is_trained_or_dropped_once(
    seed: int, max_staleness: int, is_overlapped: bool
) -> None:
    rng = random.Random(seed)
    world = World(lambda: rng.choice([0.0, 0.0, 0.001, 0.004]), equal=frozenset(rng.sample(range(20), 5)))

    async def run(task: Task, group_id: str, update: int) -> RolloutGroup:
        group = await world.run_group(task, group_id, update)
        return faults_of(group_id, task, update) if rng.random() < 0.3 else group

    async def train_and_hold() -> tuple[list[GspoBatch], list[GspoBatch]]:
        async def hand_over(update: int) -> None:
            await asyncio.sleep(rng.choice([0.0, 0.003]) if is_overlapped else 0.0)
            world.version = update
            await collector.advance(update)

        trained, discarded, handover = [], [], None
        async with collector:
            for update in range(6):
                while (batch := await collector.collect(update)).fault_share > 0.3:
                    discarded.append(await collector.hold(batch, update=update))
                    assert discarded[-1].groups, "each hold makes progress"
                    await asyncio.sleep(rng.choice([0.0, 0.002]))
                    discarded.append(await collector.resume(update))
                trained.append(batch)
                if handover is not None:
                    await handover
                if update < 5:
                    handover = asyncio.create_task(hand_over(update + 1))
                    if not is_overlapped:
                        await handover
        return trained, discarded

    collector = collector_of(
        run, max_staleness=max_staleness, zero_variance="top_up", max_top_ups=1, max_fault_share=0.3
    )
    trained, discarded = asyncio.run(train_and_hold())
    final = Counter(group.group_id for batch in trained for group in batch.groups)
    again = Counter(group.group_id for batch in discarded for group in batch.groups)
    assert set(final.values()) == {1}
    assert final + again == Counter(world.begun), "every start of a group is recorded once"
    for update, batch in enumerate(trained):
        assert sum(group.status is not GroupStatus.STALE for group in batch.groups) >= 2
        for trajectory in batch.trajectories:
            assert min(v for v in trajectory.policy_versions or () if v >= 0) >= update - max_staleness


async def test_replay_rows_of_discarded_groups_may_join_other_groups_of_the_update() -> None:
    builder, world = InjectingBuilder(), World()

    async def run(task: Task, group_id: str, update: int) -> RolloutGroup:
        group = await world.run_group(task, group_id, update)
        return faults_of(group_id, task, update) if group_id == "s-g000000" else group

    collector = AsynchronousCollector(
        run,
        builder,
        RoundRobin(TASKS, seed="x", tasks_per_update=2),
        stage_key="s",
        section=RolloutSection(mode="asynchronous", max_staleness=0, max_fault_share=0.4),
        groups_per_update=2,
        num_updates=2,
    )
    async with collector:
        batch = await collector.collect(0)
        assert len(batch.injections) == 2
        assert len((await collector.hold(batch, update=0)).injections) == 1
    assert builder.given_back == [(0, 1)]
