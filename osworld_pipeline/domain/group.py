"""A rollout group: sibling episodes of one task, and the replay row that may join them."""

from dataclasses import dataclass

from osworld_pipeline.domain.episode import Episode
from osworld_pipeline.domain.replay import ReplayRow


@dataclass(frozen=True, kw_only=True)
class RolloutGroup:
    group_id: str
    task_id: str
    stage_key: str
    update: int
    episodes: tuple[Episode, ...]
    replay: ReplayRow | None = None

    @property
    def valid_episodes(self) -> tuple[Episode, ...]:
        return tuple(episode for episode in self.episodes if episode.outcome.is_valid)
