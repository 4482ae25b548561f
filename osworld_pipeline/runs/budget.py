"""The remaining budget of a run: wall time, episodes and sampled tokens. The spent amounts are read from the trajectory
store, so they remain correct when a killed stage resumes in the same run."""

from collections.abc import Iterable
from dataclasses import dataclass

from osworld_pipeline.domain.episode import Episode
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.recipes.schema import RetrainingSection
from osworld_pipeline.tables.replay.rows import part_views

_SPENT = """
WITH mine AS (SELECT episode_id FROM episodes WHERE run_ids['dagster'] = $run_id)
SELECT (SELECT count(*) FROM mine),
       (SELECT coalesce(sum(response_num_tokens), 0)::BIGINT FROM steps SEMI JOIN mine USING (episode_id))
"""


@dataclass(frozen=True, kw_only=True)
class Spent:
    episodes: int = 0
    tokens: int = 0
    """Sampled by the policy."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The remaining amounts; None means no limit."""

    deadline: float | None = None
    """Unix time."""
    episodes: int | None = None
    tokens: int | None = None
    """Sampled by the policy."""

    def less(self, spent: Spent) -> "Budget":
        return Budget(
            deadline=self.deadline,
            episodes=None if self.episodes is None else self.episodes - spent.episodes,
            tokens=None if self.tokens is None else self.tokens - spent.tokens,
        )

    def end_reason(self, *, now: float) -> str:
        """Why no further work may start, with the recipe key that limits it; empty if work may start."""
        if self.deadline is not None and now >= self.deadline:
            return "the budget of wall time is spent (retraining.max_wall_s)"
        if self.episodes is not None and self.episodes <= 0:
            return "the budget of episodes is spent (retraining.max_episodes)"
        if self.tokens is not None and self.tokens <= 0:
            return "the budget of sampled tokens is spent (retraining.max_tokens)"
        return ""


UNLIMITED = Budget()


def whole_budget(section: RetrainingSection, *, began_at: float) -> Budget:
    """The budget of a re-training that began at `began_at` (Unix time)."""
    return Budget(deadline=began_at + section.max_wall_s, episodes=section.max_episodes, tokens=section.max_tokens)


def spent_by(episodes: Iterable[Episode]) -> Spent:
    """Counts last attempts only, as the store keeps them."""
    counted = list(episodes)
    tokens = sum(step.response_num_tokens for episode in counted for step in episode.steps)
    return Spent(episodes=len(counted), tokens=tokens)


def read_spent(state: StateDir, run_id: str) -> Spent:
    """Totals of the recorded episodes of a Dagster run. Raises TableError, StoreError."""
    with part_views(state, "episodes", "steps") as views:
        row = views.execute(_SPENT, {"run_id": run_id}).fetchone()
    assert row is not None, "two counts are always a row"
    return Spent(episodes=row[0], tokens=row[1])
