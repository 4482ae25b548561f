"""One episode from reset to grade. Only this module catches boundary errors: every failure of policy, desktop or grader
becomes an outcome, and a fault is never a zero reward."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from osworld_pipeline.agent.renderer import Renderer
from osworld_pipeline.dialects import load_dialect
from osworld_pipeline.domain.checkpoint import milestone_id
from osworld_pipeline.domain.episode import (
    ContextMode,
    Episode,
    EpisodePurpose,
    Outcome,
    Parity,
    Reward,
    SamplingParams,
)
from osworld_pipeline.domain.task import Task
from osworld_pipeline.errors import (
    EvaluatorError,
    PipelineError,
    ReplicaError,
    SetupError,
    TouchedError,
)
from osworld_pipeline.protocols import Desktop, EpisodeSink, PolicyEngine
from osworld_pipeline.recipes.schema import AgentSection, DesktopSection, RewardSection
from osworld_pipeline.rollout.attempt import Attempt, LimitReachedError, Stop
from osworld_pipeline.rollout.env_answers import UnreachableError
from osworld_pipeline.rollout.reward import shape_reward
from osworld_pipeline.wire.faults import END_AN_EPISODE, outcome_of
from osworld_pipeline.wire.tracing import episode_span, span

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class EpisodePlan:
    """Identity and settings of an episode, fixed before it runs: a rerun has the same identity and replaces it."""

    episode_id: str
    purpose: EpisodePurpose
    checkpoint_id: str
    sampling: SamplingParams
    group_id: str | None = None
    seed: int = 0
    stage_key: str = ""
    update: int = -1
    run_ids: Mapping[str, str] = field(default_factory=dict)
    stage: str = ""
    suite: str = ""
    """The same as in Episode, like the next field."""
    suite_name: str = ""
    parent_id: str = ""
    """The checkpoint whose weights the stage in training starts with."""

    def weights_id(self, policy_version: int) -> str:
        """The name of the weights after this number of updates of the stage."""
        if not self.parent_id:
            return self.checkpoint_id
        return milestone_id(self.checkpoint_id, policy_version) if policy_version else self.parent_id


@dataclass(frozen=True, kw_only=True)
class EpisodeSettings:
    """How episodes are run: the agent's input, and all limits."""

    agent: AgentSection
    desktop: DesktopSection
    reward: RewardSection
    max_turns: int
    episode_timeout_s: float = 900.0
    """Limit from the first observation to the last action, without the wait for a free replica."""
    turn_timeout_s: float = 120.0
    reset_timeout_s: float = 600.0
    evaluate_timeout_s: float = 120.0
    max_env_attempts: int = 3


@dataclass(frozen=True, kw_only=True)
class EpisodeTools:
    """The services that an episode uses; all of them outlive it."""

    desktop_factory: Callable[[], Desktop]
    engine: PolicyEngine
    renderer: Renderer | None
    """None for a chat engine."""
    sink: EpisodeSink
    parity: Parity | None = None
    """Result of the engine's parity probe, recorded with each episode; None if it was not probed."""


RunEpisode = Callable[[Task, EpisodePlan], Awaitable[Episode]]
"""Runs one episode, in this process or another. Raises the errors of `run_episode`."""


def episode_runner(tools: EpisodeTools, settings: EpisodeSettings) -> RunEpisode:
    """Runs episodes in this process with these tools."""

    async def run(task: Task, plan: EpisodePlan) -> Episode:
        return await run_episode(task, plan, tools=tools, settings=settings)

    return run


async def run_episode(task: Task, plan: EpisodePlan, *, tools: EpisodeTools, settings: EpisodeSettings) -> Episode:
    """Runs the task, on another replica if one died or could not be set up, and records the outcome. The errors below
    end the run, because more episodes would not help.

    Raises:
        RecipeError: the recipe's context is too small for a first turn.
        StoreError: a screenshot could not be stored.
        TokenEndedError: the run's token for the env servers has expired.
    """
    about = {
        "osworld.episode_id": plan.episode_id,
        "osworld.task_id": task.task_id,
        "osworld.checkpoint_id": plan.checkpoint_id,
        "osworld.group_id": plan.group_id,
        "osworld.purpose": plan.purpose,
    }
    with episode_span(plan.episode_id, about) as ending:
        episode = await _run_attempts(task, plan, tools=tools, settings=settings)
        ending["osworld.outcome"] = episode.outcome
        ending["osworld.reward"] = episode.reward.task if episode.reward else None
        ending["osworld.num_steps"] = len(episode.steps)
    return episode


async def _run_attempts(task: Task, plan: EpisodePlan, *, tools: EpisodeTools, settings: EpisodeSettings) -> Episode:
    dialect = load_dialect(settings.agent.dialect, settings.agent.coordinate_space)
    earlier_faults: list[str] = []
    while True:
        started_at = time.time()
        attempt = Attempt(
            task,
            tools.desktop_factory(),
            engine=tools.engine,
            renderer=tools.renderer,
            sink=tools.sink,
            dialect=dialect,
            agent=settings.agent,
            sampling=plan.sampling,
            episode_id=f"{plan.episode_id}-a{len(earlier_faults)}",
            record_id=plan.episode_id,
            pause_s=settings.desktop.pause_s,
            diff_threshold=settings.reward.screen_diff_threshold,
        )
        with span("attempt", number=len(earlier_faults)):
            ending = await _run_attempt(attempt, settings)
        if not ending.is_worth_retrying or len(earlier_faults) + 1 >= settings.max_env_attempts:
            return _record(
                task, plan, attempt, ending, tools, settings, earlier_faults=earlier_faults, started_at=started_at
            )
        replica = f" on {attempt.desktop_info.replica_id}" if attempt.desktop_info else ""
        earlier_faults.append(f"{ending.outcome}{replica}: {ending.error}")


@dataclass(frozen=True, kw_only=True)
class _Ending:
    outcome: Outcome
    error: str | None = None
    reward: Reward | None = None
    is_worth_retrying: bool = False


async def _run_attempt(attempt: Attempt, settings: EpisodeSettings) -> _Ending:
    total_started = time.monotonic()
    try:
        await _limited(attempt.reset(), settings.reset_timeout_s, ReplicaError, "the reset")
        stop = await attempt.run_turns(
            max_turns=settings.max_turns,
            episode_timeout_s=settings.episode_timeout_s,
            turn_timeout_s=settings.turn_timeout_s,
        )
        task_reward = await _limited(attempt.score(), settings.evaluate_timeout_s, EvaluatorError, "the evaluation")
        return _graded(attempt, stop, task_reward, settings)
    except (LimitReachedError, *END_AN_EPISODE) as error:
        outcome = Outcome.TIMEOUT if isinstance(error, LimitReachedError) else outcome_of(error)
        # A full server, or one that refuses us, would answer the retry likewise. A dead replica, or a server that died
        # during an episode, may have a healthy replacement.
        has_died = isinstance(error, UnreachableError) and attempt.desktop_info is not None
        retry = isinstance(error, ReplicaError | SetupError) or has_died
        if isinstance(error, TouchedError):
            attempt.num_person_inputs = max(attempt.num_person_inputs, error.num_inputs)
        return _Ending(
            outcome=outcome,
            error=str(error) or type(error).__name__,
            reward=Reward(task=0.0) if outcome is Outcome.TAMPERING else None,  # no partial credit
            is_worth_retrying=retry and outcome not in (Outcome.TAMPERING, Outcome.TOUCHED),
        )
    finally:
        await attempt.close()
        attempt.times_s["total"] = time.monotonic() - total_started


async def _limited(
    awaitable: Awaitable[Result], timeout_s: float, error_class: type[PipelineError], what: str
) -> Result:
    try:
        async with asyncio.timeout(timeout_s):
            return await awaitable
    except TimeoutError as error:
        raise error_class(f"{what} took longer than {timeout_s:g} s") from error


def _graded(attempt: Attempt, stop: Stop, task_reward: float, settings: EpisodeSettings) -> _Ending:
    if task_reward >= settings.reward.success_threshold:
        outcome = Outcome.SUCCESS
    elif stop is Stop.TERMINATED:
        outcome = Outcome.FAILURE
    else:
        outcome = Outcome.TRUNCATED
    reward = shape_reward(
        task_reward,
        [step.signals for step in attempt.steps],
        max_steps=settings.max_turns,
        section=settings.reward,
        has_a11y_tree=settings.desktop.require_a11y_tree,
    )
    return _Ending(outcome=outcome, reward=reward)


def _image_tokens(attempt: Attempt, tools: EpisodeTools) -> int | None:
    sequences, renderer = attempt.context.sequences, tools.renderer
    if renderer is None or not sequences:
        return None
    return sum(sequence.token_ids.count(renderer.image_id) for sequence in sequences)


def _record(
    task: Task,
    plan: EpisodePlan,
    attempt: Attempt,
    ending: _Ending,
    tools: EpisodeTools,
    settings: EpisodeSettings,
    *,
    earlier_faults: Sequence[str],
    started_at: float,
) -> Episode:
    info = attempt.desktop_info
    version = attempt.steps[0].policy_version if attempt.steps else None
    episode = Episode(
        episode_id=plan.episode_id,
        task_id=task.task_id,
        domain=task.domain,
        task_digest=task.config_digest,
        purpose=plan.purpose,
        checkpoint_id=plan.checkpoint_id,
        stage=plan.stage,
        suite=plan.suite,
        suite_name=plan.suite_name,
        weights_id="" if version is None else plan.weights_id(version),
        weights_update=version if plan.parent_id else None,
        engine=tools.engine.name,
        processor_digest=tools.renderer.processor_digest if tools.renderer else "",
        sampling=plan.sampling,
        dialect=attempt.dialect.name,
        coordinate_space=attempt.dialect.coordinate_space,
        outcome=ending.outcome,
        error=ending.error,
        reward=ending.reward,
        steps=tuple(attempt.steps),
        group_id=plan.group_id,
        seed=plan.seed,
        attempt=len(earlier_faults),
        earlier_faults=tuple(earlier_faults),
        context_mode=ContextMode(settings.agent.context_mode),
        sequences=attempt.context.sequences,
        image_num_tokens=_image_tokens(attempt, tools),
        parity=tools.parity,
        stage_key=plan.stage_key,
        update=plan.update,
        max_turns=settings.max_turns,
        num_person_inputs=attempt.num_person_inputs,
        times_s=dict(attempt.times_s),
        started_at=started_at,
        run_ids=dict(plan.run_ids),
    )
    if info is not None:
        episode = replace(
            episode,
            replica_id=info.replica_id,
            provider=info.provider,
            image_digest=info.image_digest,
            grader_version=info.grader_version,
        )
    return episode
