"""Collects the groups of an update: the interface, and the strictly on-policy implementation.

`synchronous`: the groups of an update start when its weights are loaded, and all end before it trains. The result
depends only on plan, weights and desktops, so a rerun collects the same.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, Self

from osworld_pipeline.domain.episode import Episode, Outcome
from osworld_pipeline.domain.group import GroupStatus, RolloutGroup
from osworld_pipeline.domain.task import Task
from osworld_pipeline.recipes.schema import RolloutSection
from osworld_pipeline.rollout.batch import GspoBatch, merge_batches
from osworld_pipeline.rollout.run_group import group_id_of, require_services
from osworld_pipeline.rollout.task_sampling import TaskSampler

RunGroup = Callable[[Task, str, int], Awaitable[RolloutGroup]]
"""Runs the group of this task, name and update. Raises errors that end a run: RecipeError, StoreError,
TokenEndedError."""


class BatchBuilder(Protocol):
    """Turns groups into a batch. Blocks: it is called in a thread, one call at a time."""

    def __call__(self, groups: Sequence[RolloutGroup], *, update: int) -> GspoBatch: ...

    def give_back(self, num_injections: int, *, update: int) -> None:
        """Subtracts this number from the replay injections counted for `update`, because they are not trained on: other
        rows may be injected instead."""
        ...


class Collector(Protocol):
    """Use it as a context manager: all its tasks end with the block."""

    async def collect(self, update: int) -> GspoBatch:
        """The batch of `update`: its groups, and those that were dropped since the batch before. The engine has the
        weights that `update` trains; in asynchronous mode it may have those of the update before, until `advance` is
        called.

        Raises:
            RecipeError, StoreError, TokenEndedError: as run_episode.
            EnvServerError, EngineError: no episode can be run.
            TableError: the tables cannot be read.
        """
        ...

    async def advance(self, update: int) -> None:
        """Call it once the engine has the weights that `update` trains."""
        ...

    async def hold(self, batch: GspoBatch, *, update: int) -> GspoBatch:
        """`batch`, collected for `update`, is not trained on, and no group starts until `resume`. Returns the groups
        that are discarded; they run again, with the same names, after `resume`. The others are kept for `collect`.

        Raises:
            As collect.
        """
        ...

    async def resume(self, update: int) -> GspoBatch:
        """Groups may start again after `hold`. Returns the groups that were discarded since `hold`, assigned to
        `update`."""
        ...

    def snapshot(self) -> Mapping[str, Any]:
        """State for a resumed run, as JSON."""
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
            num_trained = sum(batch.num_groups(GroupStatus.TRAINED) for batch in batches)
            num_top_ups_left = self._groups_per_update + self._max_top_ups - num_run
            num_next = min(self._groups_per_update - num_trained, num_top_ups_left)
            if merge_batches(batches).fault_share > self._max_fault_share:
                break  # It will be held; more groups would meet the same faults.
        return merge_batches(batches)

    async def advance(self, update: int) -> None:
        """No groups run between updates."""

    async def hold(self, batch: GspoBatch, *, update: int) -> GspoBatch:
        """Discards all of it: a retry has the same tasks, names and seeds."""
        self._builder.give_back(len(batch.injections), update=update)
        return batch

    async def resume(self, update: int) -> GspoBatch:
        """No groups run between a hold and the next `collect`, so none are discarded."""
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
            # One error ended the run; the others are consequences.
            raise failures.exceptions[0] from failures
        return [job.result() for job in jobs]


class FaultWatch:
    """Called with every episode. If the last `num_episodes` were all faults of desktops or engine, it raises the error
    of `require_services`, because more episodes would not help."""

    def __init__(self, num_episodes: int, *, can_hold: bool = False) -> None:
        """`can_hold`: an update with faults is held and retried. Desktops and engine that have worked once may then
        recover, so this raises only before the first graded episode."""
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
