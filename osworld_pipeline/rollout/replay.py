"""The replay buffer: when all siblings of a group failed, one recorded success joins it as a positive example.

It holds no rows; it queries the tables for candidates, draws by seed, and tries the next one if a row cannot be used.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from osworld_pipeline.domain.checkpoint import Ancestor
from osworld_pipeline.domain.group import RolloutGroup
from osworld_pipeline.domain.replay import ReplayRow
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.domain.trajectory import Trajectory
from osworld_pipeline.errors import ActionParseError, StoreError
from osworld_pipeline.recipes.schema import ReplaySection
from osworld_pipeline.rollout.replay_strategies import failure_priority, row_weights, weighted_order
from osworld_pipeline.tables.replay.candidates import ReplayCandidate, ReplayCandidates, online_row
from osworld_pipeline.tables.replay.rows import read_replay_rows

PREFETCHED_GROUPS = 256
"""Groups whose first choices are read together, which limits the number of rows with messages in memory."""

Render = Callable[[RolloutGroup, ReplayRow], list[Trajectory]]
"""A row as trajectories for that group; raises one of UNUSABLE if it cannot be used."""
UNUSABLE = (ValueError, StoreError, ActionParseError)


@dataclass(frozen=True, kw_only=True)
class ServedGroup:
    row: ReplayRow
    trajectories: list[Trajectory]


@dataclass(frozen=True, kw_only=True)
class SkippedRow:
    """A candidate that was drawn and could not be used."""

    group_id: str
    row_id: str
    reason: str

    def __str__(self) -> str:
        return f"replay row {self.row_id} does not join group {self.group_id}: {self.reason}"


@dataclass(frozen=True, kw_only=True)
class ReplayStats:
    """Statistics of one update."""

    num_checks: int = 0
    """Groups checked."""
    num_failed: int = 0
    """Those with a valid episode and none that reached the threshold."""
    num_served: int = 0
    num_online: int = 0
    """Served with a success of our own rollouts."""
    num_verified: int = 0
    """Served with a row that reached the threshold in a verification."""
    num_skipped: int = 0
    """Rows drawn that could not be used."""

    @property
    def rate(self) -> float:
        """Groups served per group checked."""
        return self.num_served / self.num_checks if self.num_checks else 0.0


@dataclass(frozen=True, kw_only=True)
class Served:
    groups: Mapping[str, ServedGroup]
    """Served groups by group id."""
    skipped: tuple[SkippedRow, ...]
    stats: ReplayStats


class ReplayBuffer:
    """Serves one training stage. Close it, or use it as a context manager."""

    def __init__(
        self,
        state: StateDir,
        section: ReplaySection,
        *,
        stage_key: str = "",
        lineage: Sequence[Ancestor] = (),
        seed: int = 0,
    ) -> None:
        """`lineage`: the stages that this one descends from, nearest first; their successes may be injected too.

        Raises:
            TableError: the tables cannot be read.
        """
        self._state = state
        self._section = section
        self._seed = f"{stage_key}:{seed}"
        self._candidates = ReplayCandidates(state, section, stage_key=stage_key, lineage=lineage)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._candidates.close()

    def coverage(self, task_ids: Sequence[str]) -> float:
        """The share of these tasks that could be served now; 0 for none."""
        return len(self._candidates.find(task_ids)) / len(set(task_ids)) if task_ids else 0.0

    def serve(
        self, groups: Sequence[RolloutGroup], *, update: int, render: Render, num_served_before: int = 0
    ) -> Served:
        """Chooses rows for the groups of an update in which every raw task reward is below the threshold.
        `num_served_before`: groups of the same update that were served in earlier calls.

        A group without a valid episode gets none, because it has no failure to contrast with a success. The draw of a
        group depends only on the tables, the seed, the update and the group's id.

        Raises:
            TableError: the tables cannot be read.
        """
        failed = [group for group in groups if self._has_failed(group)]
        most = self._section.max_injections
        limit = len(failed) if most is None else max(0, most - num_served_before)
        served: dict[str, ServedGroup] = {}
        skipped: list[SkippedRow] = []
        if failed and limit:
            self._candidates.look(update)
            found = self._candidates.find([group.task_id for group in failed])
            waiting = self._order([group for group in failed if group.task_id in found], update)
            while waiting and len(served) < limit:
                count = min(PREFETCHED_GROUPS, limit - len(served))
                now, waiting = waiting[:count], waiting[count:]
                drawn = {group.group_id: self._draw(group, found[group.task_id], update) for group in now}
                first_rows = self._read([rows[0] for rows in drawn.values()])
                for group in now:
                    one = self._serve_one(group, drawn[group.group_id], first_rows, skipped, render)
                    if one is not None:
                        served[group.group_id] = one
        return Served(groups=served, skipped=tuple(skipped), stats=self._stats(groups, failed, served, skipped))

    def _has_failed(self, group: RolloutGroup) -> bool:
        rewards = [episode.reward.task for episode in group.valid_episodes if episode.reward is not None]
        return bool(rewards) and all(reward < self._section.threshold for reward in rewards)

    def _order(self, groups: Sequence[RolloutGroup], update: int) -> list[RolloutGroup]:
        if self._section.strategy == "recent_failure":
            weights = [failure_priority(self._candidates.recent_groups(group.task_id)) for group in groups]
        else:
            weights = [1.0] * len(groups)
        return weighted_order(groups, weights, random.Random(f"{self._seed}:{update}"))

    def _draw(self, group: RolloutGroup, rows: Sequence[ReplayCandidate], update: int) -> list[ReplayCandidate]:
        """The order in which the rows are tried."""
        weights = row_weights(self._section.strategy, rows, injected=self._candidates.injected)
        return weighted_order(rows, weights, random.Random(f"{self._seed}:{update}:{group.group_id}"))

    def _read(self, rows: Sequence[ReplayCandidate]) -> dict[str, ReplayRow]:
        read = {row.row_id: online_row(row) for row in rows if row.kind == "episode"}
        verified = {row.row_id: row.verified_reward for row in rows if row.kind == "demonstration"}
        for row in read_replay_rows(self._state, verified).values():
            read[row.row_id] = replace(row, verified_reward=verified[row.row_id])
        return read

    def _serve_one(
        self,
        group: RolloutGroup,
        rows: Sequence[ReplayCandidate],
        first_rows: Mapping[str, ReplayRow],
        skipped: list[SkippedRow],
        render: Render,
    ) -> ServedGroup | None:
        for candidate in rows:
            row = first_rows.get(candidate.row_id) or self._read([candidate]).get(candidate.row_id)
            try:
                if row is None:
                    raise StoreError(f"replay row {candidate.row_id} is no longer in the replay buffer")
                return ServedGroup(row=row, trajectories=render(group, row))
            except UNUSABLE as error:
                skipped.append(SkippedRow(group_id=group.group_id, row_id=candidate.row_id, reason=str(error)))
        return None

    def _stats(
        self,
        groups: Sequence[RolloutGroup],
        failed: Sequence[RolloutGroup],
        served: Mapping[str, ServedGroup],
        skipped: Sequence[SkippedRow],
    ) -> ReplayStats:
        rows = [one.row for one in served.values()]
        verified = [row.verified_reward for row in rows if row.verified_reward is not None]
        return ReplayStats(
            num_checks=len(groups),
            num_failed=len(failed),
            num_served=len(rows),
            num_online=sum(row.is_online for row in rows),
            num_verified=sum(reward >= self._section.threshold for reward in verified),
            num_skipped=len(skipped),
        )
