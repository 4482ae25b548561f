"""Episodes and replay rows as the trainer sees them. An episode's token ids are the sampler's own."""

from collections.abc import Callable

from osworld_pipeline.agent.renderer import Renderer, render_demonstration
from osworld_pipeline.domain.episode import Episode
from osworld_pipeline.domain.replay import ReplayRow
from osworld_pipeline.domain.trajectory import Trajectory

ReadBlob = Callable[[str], bytes]
"""An image's bytes by SHA-256; raises StoreError."""


def episode_trajectory(
    episode: Episode, read_blob: ReadBlob, *, advantage: float = 0.0, weight: float = 1.0
) -> Trajectory:
    """A valid episode as a sequence, its screenshots read back by hash.

    Raises:
        ValueError: the episode ended in a fault or a timeout, or holds no sampled token.
    """
    if not episode.outcome.is_valid:
        raise ValueError(f"episode {episode.episode_id} ended in {episode.outcome}: it is not trained on")
    if not any(episode.response_mask):
        raise ValueError(f"episode {episode.episode_id} holds no sampled token")
    return Trajectory(
        trajectory_id=episode.episode_id,
        task_id=episode.task_id,
        token_ids=episode.token_ids,
        response_mask=episode.response_mask,
        images=tuple(read_blob(step.screenshot_sha256) for step in episode.steps),
        sampled_logprobs=episode.sampled_logprobs,
        advantage=advantage,
        weight=weight,
    )


def replay_trajectory(
    row: ReplayRow,
    read_blob: ReadBlob,
    renderer: Renderer,
    *,
    max_tokens: int | None = None,
    advantage: float = 0.0,
    weight: float = 1.0,
    is_replay: bool = True,
) -> Trajectory:
    """A replay row (or, with `is_replay=False`, a demonstration for SFT) in the layout episodes have.

    Raises:
        ValueError: placeholders and images disagree, or nothing fits within `max_tokens`; names the row.
    """
    try:
        rendered = render_demonstration(
            renderer, row.messages, [read_blob(sha256) for sha256 in row.image_sha256s], max_tokens=max_tokens
        )
    except ValueError as error:
        raise ValueError(f"replay row {row.row_id[:12]} of task {row.task_id}: {error}") from error
    return Trajectory(
        trajectory_id=f"{'replay' if is_replay else 'demo'}:{row.row_id}",
        task_id=row.task_id,
        token_ids=rendered.token_ids,
        response_mask=rendered.mask,
        images=rendered.images,
        advantage=advantage,
        weight=weight,
        is_replay=is_replay,
    )
