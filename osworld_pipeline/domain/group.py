"""A rollout group: sibling episodes of one task, and the replay row that may join them."""

from dataclasses import dataclass

from osworld_pipeline.domain.episode import Episode


@dataclass(frozen=True, kw_only=True)
class ReplayRow:
    """A successful trajectory used again; `source_*` is kept through injection (provenance)."""

    row_id: str
    """Digest of task and messages; the key of the `replay` table."""
    task_id: str
    original_task_id: str
    source_dataset: str
    reward: float
    messages: tuple[dict, ...]
    """Chat turns, content always a list of {type: text|image}."""
    image_sha256s: tuple[str, ...]
    """Blobs in placeholder order."""


@dataclass(frozen=True, kw_only=True)
class Injection:
    injection_id: str
    group_id: str
    row_id: str
    task_id: str
    source_dataset: str
    reward: float
    advantage: float
    weight: float


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
