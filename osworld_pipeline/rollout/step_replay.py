"""A ring buffer of steps with discounted returns, the sampling source of OSGym's data servers: filled by episodes as
they end, or from the store by an SQL condition. A return is G_t = r_t + gamma G_(t+1); that of the last step is its
reward.

The reward of the last step is the grader's score, all others are 0; a fault has no reward and is not added.
"""

import random
import threading
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import duckdb

from osworld_pipeline.domain.digest import canonical_json
from osworld_pipeline.domain.episode import Episode
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import TableError
from osworld_pipeline.tables.catalog import first_line
from osworld_pipeline.tables.replay.rows import part_views

CAPACITY = 10_000
_FILL = """
WITH chosen AS (
    SELECT e.episode_id, e.task_reward, e.started_at FROM episodes e
    WHERE e.is_valid AND e.task_reward IS NOT NULL AND e.purpose <> 'superseded' AND ({where})
    ORDER BY e.started_at DESC, e.episode_id DESC
    LIMIT {capacity}
)
SELECT s.episode_id, s.task_id, s.step_index, s.screenshot_sha256, s.observation_text, s.response_text, s.action,
       c.task_reward
FROM steps s JOIN chosen c USING (episode_id)
ORDER BY c.started_at, s.episode_id, s.step_index
"""


@dataclass(frozen=True, kw_only=True)
class ReplayStep:
    """One step as it was sampled; the screenshot is read from the store by its hash."""

    episode_id: str
    task_id: str
    step_index: int
    screenshot_sha256: str
    observation_text: str
    response_text: str
    action: str | None
    """Canonical JSON; None if nothing could be parsed."""


@dataclass(frozen=True, kw_only=True)
class SampledStep:
    step: ReplayStep
    discounted_return: float
    is_last: bool


@dataclass(frozen=True, kw_only=True)
class StepReplayStats:
    num_steps: int
    num_episodes: int
    num_below: int
    """Steps with a return below the balance threshold."""
    num_above: int
    """The others."""
    outcome_mean: float | None
    """Mean reward of last steps; None if there are none."""
    episodes_by_num_steps: Mapping[int, int]
    """Number of episodes by their number of steps in the ring."""


class StepReplayBuffer:
    """The newest `capacity` steps of ended episodes; thread-safe."""

    def __init__(
        self,
        capacity: int = CAPACITY,
        *,
        reward_discount: float = 1.0,
        only_keep_outcome: bool = False,
        balance_threshold: float = 0.1,
        seed: int = 0,
    ) -> None:
        """`only_keep_outcome`: keeps only the last step of each episode.

        Raises:
            ValueError: a capacity below 1, or a discount outside 0..1.
        """
        if capacity < 1 or not 0.0 <= reward_discount <= 1.0:
            raise ValueError(
                f"invalid capacity {capacity} or reward discount {reward_discount}: the capacity must be at least 1, "
                "the discount within 0..1"
            )
        self._discount = reward_discount
        self._only_keep_outcome = only_keep_outcome
        self._threshold = balance_threshold
        self._rng = random.Random(seed)
        self._ring: deque[SampledStep] = deque(maxlen=capacity)
        self._open: dict[str, list[tuple[ReplayStep, float]]] = {}
        self._lock = threading.Lock()

    @classmethod
    def from_store(cls, state: StateDir, where: str = "true", *, capacity: int = CAPACITY, **settings: Any) -> Self:
        """Filled with the newest valid episodes for which `where` holds: SQL over `e`, the episodes table. It becomes
        part of the query, so it must come from the user who runs the program.

        Raises:
            TableError: the tables cannot be read, or the condition is not SQL.
            StoreError: as part_views.
        """
        buffer = cls(capacity, **settings)
        sql = _FILL.format(where=where, capacity=capacity)
        with part_views(state) as views:
            try:
                rows = views.execute(sql).fetchall()
            except duckdb.Error as error:
                raise TableError(f"cannot fill the step buffer where {where}: {first_line(error)}") from error
        for index, (*values, reward) in enumerate(rows):
            step = ReplayStep(**dict(zip(ReplayStep.__dataclass_fields__, values, strict=True)))
            is_last = index + 1 == len(rows) or rows[index + 1][0] != step.episode_id
            buffer.add_step(step, reward=reward if is_last else 0.0, is_last=is_last)
        return buffer

    def __len__(self) -> int:
        return len(self._ring)

    def add_step(self, step: ReplayStep, *, reward: float, is_last: bool) -> None:
        """Collects a step of a running episode; its last step adds all of them to the ring."""
        with self._lock:
            steps = self._open.setdefault(step.episode_id, [])
            steps.append((step, reward))
            if is_last:
                self._enter(self._open.pop(step.episode_id))

    def discard(self, episode_id: str) -> None:
        """Discards the collected steps of an episode that will have no valid result."""
        with self._lock:
            self._open.pop(episode_id, None)

    def add_episode(self, episode: Episode) -> int:
        """Adds an ended episode; returns the number of added steps, 0 if it ended in a fault or a timeout."""
        if not episode.outcome.is_valid or episode.reward is None or not episode.steps:
            return 0
        steps = [
            ReplayStep(
                episode_id=episode.episode_id,
                task_id=episode.task_id,
                step_index=step.step_index,
                screenshot_sha256=step.screenshot_sha256,
                observation_text=step.observation_text,
                response_text=step.response_text,
                action=None if step.action is None else canonical_json(step.action),
            )
            for step in episode.steps
        ]
        with self._lock:
            return self._enter([*((step, 0.0) for step in steps[:-1]), (steps[-1], episode.reward.task)])

    def sample(self, count: int, *, is_balanced: bool = False) -> list[SampledStep]:
        """Distinct random steps: `count`, or all if there are fewer. With `is_balanced`, half of them are below the
        threshold and half above it (an odd one above); if one side has too few, the other fills the sample."""
        with self._lock:
            steps = list(self._ring)
            if not is_balanced:
                return self._rng.sample(steps, min(count, len(steps)))
            below, above = self._split(steps)
            num_below = min(len(below), max(count // 2, count - len(above)))
            num_above = min(len(above), count - num_below)
            drawn = self._rng.sample(below, num_below) + self._rng.sample(above, num_above)
            self._rng.shuffle(drawn)
            return drawn

    @property
    def stats(self) -> StepReplayStats:
        with self._lock:
            steps = list(self._ring)
        below, above = self._split(steps)
        by_episode = Counter(sampled.step.episode_id for sampled in steps)
        outcomes = [sampled.discounted_return for sampled in steps if sampled.is_last]
        return StepReplayStats(
            num_steps=len(steps),
            num_episodes=len(by_episode),
            num_below=len(below),
            num_above=len(above),
            outcome_mean=sum(outcomes) / len(outcomes) if outcomes else None,
            episodes_by_num_steps=dict(sorted(Counter(by_episode.values()).items())),
        )

    def clear(self) -> None:
        """Removes all steps, including those of running episodes."""
        with self._lock:
            self._ring.clear()
            self._open.clear()

    def _enter(self, steps: Sequence[tuple[ReplayStep, float]]) -> int:
        kept: list[SampledStep] = []
        following = 0.0
        for step, reward in reversed(steps):
            following = reward + self._discount * following
            kept.append(SampledStep(step=step, discounted_return=following, is_last=not kept))
        entering = kept[:1] if self._only_keep_outcome else kept[::-1]
        self._ring.extend(entering)
        return len(entering)

    def _split(self, steps: Sequence[SampledStep]) -> tuple[list[SampledStep], list[SampledStep]]:
        below = [sampled for sampled in steps if sampled.discounted_return < self._threshold]
        above = [sampled for sampled in steps if sampled.discounted_return >= self._threshold]
        return below, above
