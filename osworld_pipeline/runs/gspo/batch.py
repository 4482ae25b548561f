"""Makes the batch of one update from scored groups: adds replay to failed groups, computes advantages, builds
trajectories and records."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from osworld_pipeline.agent.renderer import Renderer
from osworld_pipeline.domain.episode import Episode
from osworld_pipeline.domain.group import GroupStatus, RolloutGroup
from osworld_pipeline.domain.replay import Injection, ReplayRow
from osworld_pipeline.domain.trajectory import Trajectory
from osworld_pipeline.recipes.schema import AgentSection, ReplaySection
from osworld_pipeline.recipes.training_sections import Denominator
from osworld_pipeline.rollout.batch import GspoBatch
from osworld_pipeline.rollout.replay import ReplayBuffer, ServedGroup
from osworld_pipeline.rollout.trajectories import episode_trajectories, online_replay_trajectories, replay_trajectories
from osworld_pipeline.training.memory.fits import check_length
from osworld_pipeline.training.objective.advantage import Estimator, SignalRule, group_advantages, no_signal_reason


@dataclass(frozen=True, kw_only=True)
class RowRenderer:
    """Renders a replay row as trajectories for the group that it joins; their advantage is set later."""

    agent: AgentSection
    renderer: Renderer
    temperature: float
    """Sampling temperature of the phase."""
    read_blob: Callable[[str], bytes]
    find_episode: Callable[[str], Episode]

    def __call__(self, group: RolloutGroup, row: ReplayRow) -> list[Trajectory]:
        """
        Raises:
            ValueError: the row cannot be trained on here; names the reason.
            StoreError: its episode or one of its images is missing.
        """
        max_tokens = self.agent.max_context_tokens
        if not row.is_online:
            return replay_trajectories(
                row, self.read_blob, self.renderer, agent=self.agent, temperature=self.temperature
            )
        episode = self.find_episode(row.row_id)
        if any(other.task_digest != episode.task_digest for other in group.episodes):
            raise ValueError(f"episode {row.row_id} solved task {row.task_id} as it was before its config changed")
        return online_replay_trajectories(
            row,
            episode,
            self.read_blob,
            max_tokens=max_tokens,
            processor_digest=self.renderer.processor_digest,
            temperature=self.temperature,
        )


def build_batch(
    groups: Sequence[RolloutGroup],
    *,
    update: int,
    replay: ReplayBuffer,
    settings: ReplaySection,
    render_row: Callable[[RolloutGroup, ReplayRow], list[Trajectory]],
    read_blob: Callable[[str], bytes],
    estimator: Estimator = "mean_std",
    denominator: Denominator = "group",
    signal: SignalRule = "task",
    min_valid: int = 2,
    num_served_before: int = 0,
) -> GspoBatch:
    """Shaped rewards determine advantages; only raw task rewards determine whether replay joins; `signal` selects which
    of them determine whether a group is trained on. Groups with fewer than `min_valid` valid episodes are dropped
    first. `num_served_before`: as in ReplayBuffer.serve."""
    complete = [group for group in groups if len(group.valid_episodes) >= min_valid]
    served = replay.serve(complete, update=update, render=render_row, num_served_before=num_served_before)
    trajectories: list[Trajectory] = []
    built: list[RolloutGroup] = []
    injections: list[Injection] = []
    for group in groups:
        one = served.groups.get(group.group_id)
        if len(group.valid_episodes) < min_valid:
            built.append(replace(group, status=GroupStatus.TOO_FEW_VALID, reason=_too_few(group, min_valid)))
            continue
        joined = replace(group, replay=one.row if one else None)
        advantages = group_advantages(joined, estimator)
        reason = no_signal_reason(joined, advantages, signal)
        if reason:
            flat = _with_advantages(group, [0.0] * len(group.valid_episodes))
            built.append(replace(flat, status=GroupStatus.ZERO_VARIANCE, reason=reason))
            if denominator == "batch":
                for episode in group.valid_episodes:
                    trajectories += _counted(episode, read_blob)
            continue
        built.append(_with_advantages(joined, advantages.episodes))
        for episode, advantage in zip(group.valid_episodes, advantages.episodes, strict=True):
            if advantage or denominator != "signal":
                trajectories += _counted(episode, read_blob, advantage=advantage)
        if one is not None and advantages.replay is not None:
            trajectories += [
                # A row that joins two groups of an update counts as two episodes.
                replace(
                    part,
                    trajectory_id=f"{group.group_id}/{part.trajectory_id}",
                    advantage=advantages.replay,
                    weight=settings.weight,
                )
                for part in one.trajectories
            ]
            injections.append(_injection(group, one, advantages.replay, settings))
    return GspoBatch(
        trajectories=tuple(trajectories),
        groups=tuple(built),
        injections=tuple(injections),
        replay=served.stats,
        skipped=served.skipped,
    )


class StageBatchBuilder:
    """Implements rollout.collector.BatchBuilder for a stage. Calls `build_batch` and counts the injections of each
    update across calls."""

    def __init__(
        self,
        *,
        replay: ReplayBuffer,
        settings: ReplaySection,
        render_row: Callable[[RolloutGroup, ReplayRow], list[Trajectory]],
        read_blob: Callable[[str], bytes],
        estimator: Estimator,
        denominator: Denominator,
        signal: SignalRule,
        min_valid: int,
        max_tokens: int,
    ) -> None:
        """`max_tokens`: limit of a sequence; a longer one is refused here instead of in the middle of an update."""
        self._replay = replay
        self._settings = settings
        self._render_row = render_row
        self._read_blob = read_blob
        self._estimator: Estimator = estimator
        self._denominator: Denominator = denominator
        self._signal: SignalRule = signal
        self._min_valid = min_valid
        self._max_tokens = max_tokens
        self._num_served: Counter[int] = Counter()

    def __call__(self, groups: Sequence[RolloutGroup], *, update: int) -> GspoBatch:
        """Raises TableError, StoreError, and TrainingError if a sequence is too long."""
        batch = build_batch(
            groups,
            update=update,
            replay=self._replay,
            settings=self._settings,
            render_row=self._render_row,
            read_blob=self._read_blob,
            estimator=self._estimator,
            denominator=self._denominator,
            signal=self._signal,
            min_valid=self._min_valid,
            num_served_before=self._num_served[update],
        )
        for trajectory in batch.trajectories:
            check_length(trajectory, max_tokens=self._max_tokens)
        self._num_served[update] += len(batch.injections)
        return batch

    def give_back(self, num_injections: int, *, update: int) -> None:
        self._num_served[update] -= num_injections


def _with_advantages(group: RolloutGroup, advantages: Sequence[float]) -> RolloutGroup:
    """`advantages`: of its valid episodes, in order."""
    left = iter(advantages)
    episodes = (replace(one, advantage=next(left)) if one.outcome.is_valid else one for one in group.episodes)
    return replace(group, episodes=tuple(episodes))


def _counted(episode: Episode, read_blob: Callable[[str], bytes], *, advantage: float = 0.0) -> list[Trajectory]:
    """Empty for an episode that ended before its first response."""
    return episode_trajectories(episode, read_blob, advantage=advantage) if episode.sequences else []


def _too_few(group: RolloutGroup, min_valid: int) -> str:
    faults = [f"{one.outcome}: {one.error}" for one in group.episodes if not one.outcome.is_valid]
    first = f"; the last fault was {faults[-1]}" if faults else ""
    return f"{len(group.valid_episodes)} of {len(group.episodes)} episodes are valid, {min_valid} are needed{first}"


def _injection(group: RolloutGroup, served: ServedGroup, advantage: float, settings: ReplaySection) -> Injection:
    row = served.row
    return Injection(
        injection_id=f"{group.group_id}-{row.row_id if row.is_online else row.row_id[:12]}",
        group_id=group.group_id,
        row_id=row.row_id,
        task_id=row.task_id,
        source_dataset=row.source_dataset,
        reward=row.reward,
        advantage=advantage,
        weight=settings.weight,
        kind=row.kind,
        strategy=settings.strategy,
        verified_reward=row.verified_reward,
        source_path=row.source_path,
        source_line=row.source_line,
        source_sha256=row.source_sha256,
        licence=row.licence,
    )
