"""Collects groups while the trainer updates: an update trains on the groups that end first.

Staleness is bounded twice. With v updates in the engine's weights, B groups per update and a bound of s, at most (v + s
+ 1) B groups are started, not counting dropped ones. If groups end in the order of their starts, each starts with
weights at most s updates older than those it trains. A group that others overtook until its oldest token is older than
s is dropped as stale and replaced by a new one; among ended groups the oldest are trained first. An episode continues
with new weights that arrive while it runs: each token records the version that sampled it. An update may be collected
while the weights that it trains are still on their way to the engine.

When an update is held for faults, a group is discarded only if its own share of faults exceeds the limit. This also
applies to a group that ends before rollouts resume. Discarded groups then restart with the same names. Other ended
groups are kept, running groups continue, and no group is started meanwhile.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

from osworld_pipeline.domain.group import GroupStatus, RolloutGroup
from osworld_pipeline.domain.task import Task
from osworld_pipeline.errors import EngineError
from osworld_pipeline.recipes.schema import RolloutSection
from osworld_pipeline.rollout.batch import GspoBatch, assigned_to, merge_batches, without_training
from osworld_pipeline.rollout.collector import BatchBuilder, RunGroup
from osworld_pipeline.rollout.task_sampling import TaskSampler


@dataclass(frozen=True, kw_only=True)
class _Ended:
    serial: int
    batch: GspoBatch
    """The batch of one group."""
    judged_for: int
    """The update that its injections count for."""

    def staleness(self, update: int) -> int:
        oldest = self.batch.groups[0].oldest_policy_version
        return 0 if oldest is None else update - oldest


class AsynchronousCollector:
    def __init__(
        self,
        run_group: RunGroup,
        builder: BatchBuilder,
        sampler: TaskSampler,
        *,
        stage_key: str,
        section: RolloutSection,
        groups_per_update: int,
        num_updates: int,
        first_update: int = 0,
        resumed: Mapping[str, Any] | None = None,
    ) -> None:
        """`num_updates`: of the whole stage; no groups are started beyond it. `resumed`: the snapshot from which
        `first_update` resumes."""
        self._run_group = run_group
        self._builder = builder
        self._sampler = sampler
        self._stage_key = stage_key
        self._max_staleness = section.max_staleness
        self._max_top_ups = section.max_top_ups if section.zero_variance == "top_up" else 0
        self._groups_per_update = groups_per_update
        self._num_updates = num_updates
        self._update = first_update
        """The update whose weights the engine has."""
        self._collected = first_update
        """The update that is being collected, or whose batch is being trained; at most one ahead."""
        self._num_admitted = first_update * groups_per_update
        """Groups started and not dropped, since the stage began."""
        self._num_top_ups = 0
        """Number of replacement groups in the update that is being collected."""
        resumed = resumed or {"open": [], "next_serial": self._num_admitted}
        self._open_serials: list[int] = list(resumed["open"])
        self._next_serial: int = resumed["next_serial"]
        self._running: dict[int, asyncio.Task[None]] = {}
        self._waiting: list[_Ended] = []
        self._dropped: list[_Ended] = []
        self._taken: list[_Ended] = []
        """The groups in the batch collected last, without the dropped ones."""
        self._dropped_with_taken: list[_Ended] = []
        """The dropped groups in that batch."""
        self._is_held = False
        self._max_fault_share = section.max_fault_share
        self._judging = asyncio.Lock()
        self._changed = asyncio.Event()
        self._failure: BaseException | None = None

    @property
    def num_running(self) -> int:
        """Groups whose episodes run."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Groups that have ended and wait for their update."""
        return len(self._waiting)

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self._sampler.look, self._update)
        self._admit()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def collect(self, update: int) -> GspoBatch:
        assert update in (self._update, self._update + 1), f"{update} is collected, the engine is at {self._update}"
        self._collect_for(update)
        while True:
            self._drop_stale()
            if self._failure is not None:
                raise self._failure
            if len(self._waiting) >= self._groups_per_update:
                break
            assert self._running or update > self._update, "groups are awaited and none is running"
            # Terminates: every episode has a time limit, and its end is a change; so is the arrival of new weights.
            self._changed.clear()
            await self._changed.wait()
        # Oldest version first, and within a version in the order in which they ended.
        self._waiting.sort(key=lambda ended: -ended.staleness(update))
        self._taken = self._waiting[: self._groups_per_update]
        self._waiting = self._waiting[self._groups_per_update :]
        self._dropped_with_taken, self._dropped = self._dropped, []
        return _merged([*self._taken, *self._dropped_with_taken], update)

    async def advance(self, update: int) -> None:
        await asyncio.to_thread(self._sampler.look, update)
        self._update = update
        self._collect_for(update)
        self._admit()
        self._changed.set()

    async def hold(self, batch: GspoBatch, *, update: int) -> GspoBatch:
        if self._failure is not None:
            raise self._failure
        self._is_held = True
        self._waiting = [*self._taken, *self._waiting]
        self._dropped = [*self._dropped_with_taken, *self._dropped]
        self._taken, self._dropped_with_taken = [], []
        return await self._discard_faulty(update)

    async def resume(self, update: int) -> GspoBatch:
        discarded = await self._discard_faulty(update)
        self._is_held = False
        self._admit()
        return discarded

    def snapshot(self) -> Mapping[str, Any]:
        """Groups that have not been collected are started again, with the same names."""
        unfinished = [*self._running, *(ended.serial for ended in [*self._waiting, *self._dropped])]
        return {"open": sorted({*unfinished, *self._open_serials}), "next_serial": self._next_serial}

    def _collect_for(self, update: int) -> None:
        if update != self._collected:
            self._collected, self._num_top_ups = update, 0

    def _admit(self) -> None:
        """Starts as many groups as the bound allows; none that would be stale from the start."""
        if self._collected - self._update > self._max_staleness:
            return
        limit = min(self._update + self._max_staleness + 1, self._num_updates) * self._groups_per_update
        while self._num_admitted < limit and self._failure is None and not self._is_held:
            self._num_admitted += 1
            if self._open_serials:
                serial = self._open_serials.pop(0)
            else:
                serial, self._next_serial = self._next_serial, self._next_serial + 1
            task = asyncio.create_task(self._run(serial, self._sampler.task_of(serial)))
            self._running[serial] = task
            task.add_done_callback(lambda done, serial=serial: self._on_done(serial, done))

    async def _run(self, serial: int, task: Task) -> None:
        begun_at = self._update
        group = await self._run_group(task, f"{self._stage_key}-g{serial:06d}", begun_at)
        _require_version(group, begun_at)
        async with self._judging:
            update = self._collected
            batch = await asyncio.to_thread(self._builder, [group], update=update)
        ended = _Ended(serial=serial, batch=batch, judged_for=update)
        is_topped_up = batch.groups[0].status is not GroupStatus.TRAINED and self._num_top_ups < self._max_top_ups
        if is_topped_up and not self._will_be_held(ended):
            self._num_top_ups += 1
            self._drop([ended])
        else:
            self._waiting.append(ended)

    async def _discard_faulty(self, update: int) -> GspoBatch:
        """Discards the ended groups with too many faults. Those that were to be trained start again, with the same
        names, when groups are next admitted; the dropped ones have already been replaced."""
        again = [one for one in self._waiting if self._is_faulty(one)]
        discarded = [*again, *(one for one in self._dropped if self._is_faulty(one))]
        self._waiting = [one for one in self._waiting if not self._is_faulty(one)]
        self._dropped = [one for one in self._dropped if not self._is_faulty(one)]
        self._open_serials = sorted([*self._open_serials, *(one.serial for one in again)])
        self._num_admitted -= len(again)
        unused = [one for one in discarded if one.judged_for == update]
        async with self._judging:
            self._builder.give_back(sum(len(one.batch.injections) for one in unused), update=update)
        return _merged(discarded, update)

    def _on_done(self, serial: int, task: asyncio.Task[None]) -> None:
        del self._running[serial]
        if not task.cancelled() and task.exception() is not None:
            self._failure = self._failure or task.exception()
        self._changed.set()

    def _drop(self, ended: Sequence[_Ended]) -> None:
        """Records them with the next update and starts a new group for each."""
        self._dropped += ended
        self._num_admitted -= len(ended)
        self._admit()

    def _drop_stale(self) -> None:
        stale = [ended for ended in self._waiting if self._is_stale(ended)]
        self._waiting = [ended for ended in self._waiting if not self._is_stale(ended)]
        if stale:
            self._drop([self._as_stale(ended) for ended in stale])

    def _is_stale(self, ended: _Ended) -> bool:
        return bool(ended.batch.trajectories) and ended.staleness(self._collected) > self._max_staleness

    def _is_faulty(self, ended: _Ended) -> bool:
        return ended.batch.fault_share > self._max_fault_share

    def _will_be_held(self, ended: _Ended) -> bool:
        """Whether too many episodes that ended for the next update are faults; more groups would meet the same
        faults."""
        batches = [one.batch for one in [*self._waiting, *self._dropped, ended]]
        return merge_batches(batches).fault_share > self._max_fault_share

    def _as_stale(self, ended: _Ended) -> _Ended:
        reason = (
            f"its oldest token is {ended.staleness(self._collected)} updates old, rollout.max_staleness is "
            f"{self._max_staleness}"
        )
        return replace(ended, batch=without_training(ended.batch, GroupStatus.STALE, reason))


def _merged(ended: Sequence[_Ended], update: int) -> GspoBatch:
    """Their batch, counted for `update`."""
    return assigned_to(merge_batches([one.batch for one in ended]), update)


def _require_version(group: RolloutGroup, handed_over: int) -> None:
    """Detects an engine that stays behind, which would make every group stale."""
    oldest = group.oldest_policy_version
    if oldest is not None and oldest < handed_over:
        raise EngineError(
            f"the engine sampled group {group.group_id} with the weights after {oldest} updates, although it had "
            f"received those after {handed_over}: check that all its servers load weights, and run again"
        )
