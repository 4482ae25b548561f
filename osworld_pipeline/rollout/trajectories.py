"""Episodes and replay rows as the trainer sees them. An episode's token ids are the sampler's own."""

from collections.abc import Callable
from dataclasses import replace

from osworld_pipeline.agent.dialects import load_dialect
from osworld_pipeline.agent.fit_demonstration import fit_demonstration
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
    max_pixels: int | None = None,
    dialect: str = "slime",
    advantage: float = 0.0,
    weight: float = 1.0,
    is_replay: bool = True,
) -> Trajectory:
    """A replay row (or, with `is_replay=False`, a demonstration for SFT) in the layout episodes have. With `max_pixels`
    its images are resized as live screenshots are, and the points of its turns with them.

    Raises:
        ValueError: placeholders and images disagree, an image is damaged, or nothing fits within `max_tokens`; names
            the row.
        StoreError: an image is missing.
    """
    try:
        messages, images = row.messages, [read_blob(sha256) for sha256 in row.image_sha256s]
        if max_pixels is not None:
            messages, images = fit_demonstration(messages, images, dialect=load_dialect(dialect), max_pixels=max_pixels)
        rendered = render_demonstration(renderer, messages, images, max_tokens=max_tokens)
    except (ValueError, OSError) as error:
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


def online_replay_trajectory(
    row: ReplayRow,
    episode: Episode,
    read_blob: ReadBlob,
    *,
    max_tokens: int,
    processor_digest: str,
    advantage: float = 0.0,
    weight: float = 1.0,
) -> Trajectory:
    """A recorded success as its own sampled tokens, injected again.

    The log-probabilities that were sampled with them belong to an older policy, so they are left out: as for every
    replay row the trainer takes its own from before the update.

    Raises:
        ValueError: its tokens are of another processor, or more than `max_tokens`, or it is not to be trained on.
        StoreError: a screenshot is missing.
    """
    if episode.processor_digest and episode.processor_digest != processor_digest:
        raise ValueError(f"episode {episode.episode_id} holds tokens of another processor ({episode.processor_digest})")
    if len(episode.token_ids) > max_tokens:
        raise ValueError(
            f"episode {episode.episode_id} has {len(episode.token_ids)} tokens, more than the context of {max_tokens}"
        )
    return replace(
        episode_trajectory(episode, read_blob, advantage=advantage, weight=weight),
        trajectory_id=f"replay:{row.row_id}",
        task_id=row.task_id,
        sampled_logprobs=None,
        is_replay=True,
    )
