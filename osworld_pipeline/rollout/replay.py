"""The replay buffer: where every sibling of a group failed, one recorded success joins it, so that it can teach."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from osworld_pipeline.domain.group import RolloutGroup
from osworld_pipeline.domain.replay import ReplayRow, base_task_id


@dataclass(frozen=True, kw_only=True)
class ReplayStats:
    num_checks: int = 0
    num_injections: int = 0

    @property
    def rate(self) -> float:
        """Injections per group checked."""
        return self.num_injections / self.num_checks if self.num_checks else 0.0


class ReplayBuffer:
    """Successful trajectories by task. At most `per_task` of each id are kept: the first ones, in the order given."""

    def __init__(self, rows: Iterable[ReplayRow], *, per_task: int = 10) -> None:
        self._per_task = per_task
        self._by_id: dict[str, list[ReplayRow]] = {}
        self._by_base: dict[str, list[ReplayRow]] = {}
        self._stats = ReplayStats()
        for row in rows:
            self.add(row)

    @property
    def stats(self) -> ReplayStats:
        return self._stats

    def add(self, row: ReplayRow) -> bool:
        """Keeps the row unless its task is full or has it already; says whether it did."""
        rows = self._by_id.setdefault(row.original_task_id, [])
        if len(rows) >= self._per_task or any(kept.row_id == row.row_id for kept in rows):
            return False
        rows.append(row)
        self._by_base.setdefault(base_task_id(row.original_task_id), []).append(row)
        return True

    def find(self, task_id: str) -> Sequence[ReplayRow]:
        """Rows of exactly this id; else any chunk of its base id; at most `per_task`."""
        rows = self._by_id.get(task_id) or self._by_base.get(base_task_id(task_id)) or []
        return tuple(rows[: self._per_task])

    def inject(self, group: RolloutGroup, *, threshold: float, rng: random.Random) -> ReplayRow | None:
        """A random row of the group's task, where every raw task reward of its valid episodes is under `threshold`.

        A group without a valid episode gets none: there is nothing whose failure the row would stand beside.
        """
        self._stats = replace(self._stats, num_checks=self._stats.num_checks + 1)
        rewards = [episode.reward.task for episode in group.valid_episodes if episode.reward is not None]
        if not rewards or any(reward >= threshold for reward in rewards):
            return None
        rows = self.find(group.task_id)
        if not rows:
            return None
        self._stats = replace(self._stats, num_injections=self._stats.num_injections + 1)
        return rng.choice(rows)

    def coverage(self, task_ids: Sequence[str]) -> float:
        """The share of these tasks that the buffer could serve; 0 for none."""
        return sum(bool(self.find(task_id)) for task_id in task_ids) / len(task_ids) if task_ids else 0.0
