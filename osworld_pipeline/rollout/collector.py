"""Collects the groups of an update: the seam, and the way that keeps to the letter of on-policy training.

`synchronous`: the groups of an update begin when its weights are there, and all end before it trains. What is collected
depends on plan, weights and desktops alone, so a rerun collects the same.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, Self

from osworld_pipeline.domain.episode import Episode, Outcome
from osworld_pipeline.domain.group import GroupFate, RolloutGroup
from osworld_pipeline.domain.task import Task
from osworld_pipeline.recipes.schema import RolloutSection
from osworld_pipeline.rollout.batch import GspoBatch, merge_batches
from osworld_pipeline.rollout.run_group import group_id_of, require_services
from osworld_pipeline.rollout.task_sampling import TaskSampler

RunGroup = Callable[[Task, str, int], Awaitable[RolloutGroup]]
"""Runs the group of this task, name and update. Raises what ends a run: RecipeError, StoreError."""


class BatchBuilder(Protocol):
    """Decides what groups are worth. Blocks: it is called in a thread, never twice at a time."""

    def __call__(self, groups: Sequence[RolloutGroup], *, update: int) -> GspoBatch: ...

    def give_back(self, num_injections: int, *, update: int) -> None:
        """So many of the replay rows that joined groups for `update` are not trained on: others may join."""
        ...


class Collector(Protocol):
    """Use it as a context manager: nothing it started outlives the block."""

    async def collect(self, update: int) -> GspoBatch:
        """What `update` trains on, with all groups whose fate is known by now.

        Raises:
            RecipeError, StoreError: as run_episode.
            EnvServerError, EngineError: not one episode can be run.
            TableError: the tables cannot be read.
        """
        ...

    async def advance(self, update: int) -> None:
        """The engine has the weights that `update` trains. After `hold`: its groups may run again."""
        ...

    async def hold(self, update: int) -> GspoBatch:
        """What was collected for `update` is not trained on: `collect` will run the same groups again, and nothing
        runs before `advance`. Returns the groups that are given up with them, if any.

        Raises:
            as collect.
        """
        ...

    def snapshot(self) -> Mapping[str, Any]:
        """What a resumed run needs to go on from here, as JSON."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class SynchronousCollector:
    def __init__(
        self,
        run_group: RunGroup,
        builder: BatchBuilder,
        sampler: TaskSampler,
        *,
        stage_key: str,
        section: RolloutSection,
        groups_per_update: int,
    ) -> None:
        self._run_group = run_group
        self._builder = builder
        self._sampler = sampler
        self._stage_key = stage_key
        self._groups_per_update = groups_per_update
        self._max_top_ups = section.max_top_ups if section.zero_variance == "top_up" else 0
        self._max_fault_share = section.max_fault_share
        self._num_injections = 0
        """In what was collected last."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def collect(self, update: int) -> GspoBatch:
        await asyncio.to_thread(self._sampler.look, update)
        tasks = self._sampler.tasks_of(update)
        batches: list[GspoBatch] = []
        num_run, num_next = 0, self._groups_per_update
        while num_next:
            groups = await self._run_groups(list(itertools.islice(tasks, num_next)), update, first=num_run)
            batches.append(await asyncio.to_thread(self._builder, groups, update=update))
            num_run += num_next
            num_trained = sum(batch.num_groups(GroupFate.TRAINED) for batch in batches)
            num_top_ups_left = self._groups_per_update + self._max_top_ups - num_run
            num_next = min(self._groups_per_update - num_trained, num_top_ups_left)
            if merge_batches(batches).fault_share > self._max_fault_share:
                break  # It will be held: more groups would run into the same faults.
        batch = merge_batches(batches)
        self._num_injections = len(batch.injections)
        return batch

    async def advance(self, update: int) -> None:
        """Nothing runs between updates."""

    async def hold(self, update: int) -> GspoBatch:
        """Tasks, names and seeds of an update depend on nothing that a try changes."""
        self._builder.give_back(self._num_injections, update=update)
        return GspoBatch()

    def snapshot(self) -> Mapping[str, Any]:
        return {}

    async def _run_groups(self, tasks: Sequence[Task], update: int, *, first: int) -> list[RolloutGroup]:
        async def run(index: int, task: Task) -> RolloutGroup:
            return await self._run_group(task, group_id_of(self._stage_key, update, index), update)

        try:
            async with asyncio.TaskGroup() as running:
                jobs = [running.create_task(run(first + index, task)) for index, task in enumerate(tasks)]
        except BaseExceptionGroup as failures:
            # One cause ended the run; the others are its echo.
            raise failures.exceptions[0] from failures
        return [job.result() for job in jobs]


class FaultWatch:
    """Hears of every episode. Where the last `num_episodes` were all faults of desktops or engine, more would not help:
    it raises what `require_services` says of them."""

    def __init__(self, num_episodes: int, *, can_hold: bool = False) -> None:
        """`can_hold`: an update of faults is held and tried again. Desktops and engine that have worked once may then
        come back, and this raises only before the first episode with a grade."""
        self._last: deque[Episode] = deque(maxlen=num_episodes)
        self._can_hold = can_hold
        self._has_worked = False

    def __call__(self, episode: Episode) -> None:
        self._has_worked |= episode.outcome.is_valid
        if self._can_hold and self._has_worked:
            return
        if episode.outcome not in (Outcome.ENV_FAULT, Outcome.POLICY_FAULT):
            self._last.clear()
            return
        self._last.append(episode)
        if len(self._last) == self._last.maxlen:
            require_services(tuple(self._last))
