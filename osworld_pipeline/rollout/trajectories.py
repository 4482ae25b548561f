"""Converts episodes and replay rows to trajectories for the trainer. An episode's token ids are the sampler's own."""

from collections.abc import Callable
from dataclasses import replace

from osworld_pipeline.agent.demonstration import render_for_agent
from osworld_pipeline.agent.renderer import Renderer
from osworld_pipeline.domain.episode import ContextMode, Episode
from osworld_pipeline.domain.replay import ReplayRow
from osworld_pipeline.domain.trajectory import LazyImages, Trajectory
from osworld_pipeline.recipes.schema import AgentSection

ReadBlob = Callable[[str], bytes]
"""An image's bytes by SHA-256; raises StoreError."""


def episode_trajectories(
    episode: Episode, read_blob: ReadBlob, *, advantage: float = 0.0, weight: float = 1.0
) -> list[Trajectory]:
    """The sequences of a valid episode; screenshots are read by hash on use. They share the advantage and the
    temperature of the sampling (1 for greedy decoding, whose log-probabilities are those of temperature 1).

    Raises:
        ValueError: the episode ended in a fault or a timeout, or has no sampled tokens.
    """
    if not episode.outcome.is_valid:
        raise ValueError(f"episode {episode.episode_id} ended in {episode.outcome}: it is not trained on")
    if not any(any(sequence.response_mask) for sequence in episode.sequences):
        raise ValueError(f"episode {episode.episode_id} has no sampled tokens")
    is_one = episode.context_mode is ContextMode.APPEND
    return [
        Trajectory(
            trajectory_id=episode.episode_id if is_one else f"{episode.episode_id}#{index}",
            task_id=episode.task_id,
            token_ids=sequence.token_ids,
            response_mask=sequence.response_mask,
            images=LazyImages(read_blob, (episode.steps[step].screenshot_sha256 for step in sequence.image_steps)),
            sampled_logprobs=sequence.sampled_logprobs,
            policy_versions=sequence.policy_versions,
            temperature=episode.sampling.temperature or 1.0,
            advantage=advantage,
            weight=weight,
        )
        for index, sequence in enumerate(episode.sequences)
    ]


def replay_trajectories(
    row: ReplayRow,
    read_blob: ReadBlob,
    renderer: Renderer,
    *,
    agent: AgentSection,
    temperature: float = 1.0,
    advantage: float = 0.0,
    weight: float = 1.0,
    is_replay: bool = True,
) -> list[Trajectory]:
    """A replay row (or, with `is_replay=False`, a demonstration for SFT) in the form of the agent's own episodes: its
    dialect, image size and context mode. `temperature`: of the phase that trains on it.

    Raises:
        ValueError: placeholders and images disagree, an image is damaged, a turn cannot be expressed in the agent's
            dialect, or nothing fits the context; names the row.
        StoreError: an image is missing.
    """
    try:
        images = [read_blob(sha256) for sha256 in row.image_sha256s]
        rendered = render_for_agent(renderer, row.messages, images, agent=agent, dialect=row.dialect)
    except (ValueError, OSError) as error:
        raise ValueError(f"replay row {row.row_id[:12]} of task {row.task_id}: {error}") from error
    name = f"{'replay' if is_replay else 'demo'}:{row.row_id}"
    return [
        Trajectory(
            trajectory_id=f"{name}#{index}" if agent.context_mode == ContextMode.WINDOW else name,
            task_id=row.task_id,
            token_ids=part.token_ids,
            response_mask=part.mask,
            images=part.images,
            temperature=temperature,
            advantage=advantage,
            weight=weight,
            is_replay=is_replay,
        )
        for index, part in enumerate(rendered)
    ]


def online_replay_trajectories(
    row: ReplayRow,
    episode: Episode,
    read_blob: ReadBlob,
    *,
    max_tokens: int,
    processor_digest: str,
    temperature: float = 1.0,
    advantage: float = 0.0,
    weight: float = 1.0,
) -> list[Trajectory]:
    """A recorded success with its own sampled tokens, injected again.

    Its sampled log-probabilities belong to an older policy, so they are omitted: as for every replay row, the trainer
    computes its own before the update, at the `temperature` of the phase that trains on it.

    Raises:
        ValueError: its tokens belong to another processor, exceed `max_tokens`, or must not be trained on.
        StoreError: a screenshot is missing.
    """
    if episode.processor_digest and episode.processor_digest != processor_digest:
        raise ValueError(f"episode {episode.episode_id} has tokens of another processor ({episode.processor_digest})")
    longest = max((len(sequence.token_ids) for sequence in episode.sequences), default=0)
    if longest > max_tokens:
        raise ValueError(f"episode {episode.episode_id} has {longest} tokens, more than the context of {max_tokens}")
    trajectories = episode_trajectories(episode, read_blob, advantage=advantage, weight=weight)
    for screenshot in dict.fromkeys(step.screenshot_sha256 for step in episode.steps):
        read_blob(screenshot)  # fails now if it is missing, not in the middle of an update
    return [
        replace(
            trajectory,
            trajectory_id=trajectory.trajectory_id.replace(episode.episode_id, f"replay:{row.row_id}", 1),
            task_id=row.task_id,
            sampled_logprobs=None,
            policy_versions=None,
            temperature=temperature,
            is_replay=True,
        )
        for trajectory in trajectories
    ]
