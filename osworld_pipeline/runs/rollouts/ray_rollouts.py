"""Runs episodes on Ray actors: each has its own rollout session, on any node, and runs many episodes concurrently.

The episodes of an actor that dies are faults, never rewards: each is run again on another actor, and the losses are
recorded with it.
"""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from osworld_pipeline.domain.episode import ContextMode, Episode, Outcome
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.domain.task import Task
from osworld_pipeline.errors import EngineError, EnvServerError
from osworld_pipeline.protocols import GenerateRequest, GenerateResult, PolicyEngine
from osworld_pipeline.recipes import Recipe
from osworld_pipeline.rollout.engines.sglang_weights import TrainedWeights
from osworld_pipeline.rollout.run_episode import EpisodePlan, EpisodeSettings
from osworld_pipeline.runs.parity.probe import ParityReport
from osworld_pipeline.runs.placement import RayShare
from osworld_pipeline.runs.rollouts.embedded_server import EnvServers
from osworld_pipeline.runs.rollouts.ray_actor import ActorSession, Opened, RecipeSession, Weights
from osworld_pipeline.runs.rollouts.ray_calls import SLACK_S, LostActorError
from osworld_pipeline.runs.rollouts.ray_pool import ActorPool, open_pool
from osworld_pipeline.runs.rollouts.session import ServedWeights, episode_settings, served_weights
from osworld_pipeline.runs.shared_state import SharedState

OpenWith = Callable[[Weights, str], AbstractAsyncContextManager[ActorSession]]
"""Opens an actor's session with weights and a client id."""
LOAD_TIMEOUT_S = 600.0
"""Limit of loading a checkpoint in an actor."""


class RayRollouts:
    """A RunEpisode over several actors: `await rollouts(task, plan)`."""

    def __init__(
        self,
        pool: ActorPool,
        open_with: OpenWith,
        *,
        settings: EpisodeSettings,
        engine_name: str,
        served: ServedWeights | None = None,
    ) -> None:
        """`served`: the servers that all actors sample from; None if each actor has an engine of its own."""
        self._pool = pool
        self._open_with = open_with
        self._settings = settings
        self._engine_name = engine_name
        self._served = served

    async def __call__(self, task: Task, plan: EpisodePlan) -> Episode:
        """Returns the episode, with lost actors and failed calls among its earlier faults; after `max_env_attempts` of
        them the outcome is policy_fault. Raises as run_episode."""
        losses: list[str] = []
        lost_on: set[int] = set()
        started_at = time.time()
        while len(losses) < self._settings.max_env_attempts:
            try:
                actor = await self._pool.least_busy(avoid=lost_on)
            except (EngineError, EnvServerError) as error:
                losses.append(f"{Outcome.POLICY_FAULT}: {error}")
                continue
            try:
                episode = await self._pool.call(actor, "run_episode", task, plan, limit_s=self._episode_limit_s())
            except (LostActorError, EngineError, EnvServerError) as error:
                losses.append(f"{Outcome.POLICY_FAULT} on rollout actor {actor.index}: {error}")
                lost_on.add(actor.index)
                continue
            return replace(
                episode, attempt=episode.attempt + len(losses), earlier_faults=(*losses, *episode.earlier_faults)
            )
        return self._lost_episode(task, plan, losses, started_at)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """One response, from the actor with the fewest episodes. Raises PipelineError."""
        actor = await self._pool.least_busy()
        try:
            limit_s = self._settings.turn_timeout_s + SLACK_S
            return await self._pool.call(actor, "generate", request, limit_s=limit_s)
        except LostActorError as error:
            raise EngineError(f"rollout actor {actor.index} gave no response: {error}") from error

    @property
    def parity(self) -> ParityReport | None:
        """Parity of the servers that all actors sample from; None if they were not probed, or if each actor probes its
        own engine."""
        return None if self._served is None else self._served.parity

    async def load_trained(self, trained: TrainedWeights, *, policy_version: int) -> None:
        """Sends a trainer's weights to the servers, and then lets the actors sample them. Raises EngineError."""
        assert self._served is not None, "the trainer's weights are sent to servers"
        await self._served.engine.load_trained(trained, policy_version=policy_version)
        # The actors cannot send them.
        received = replace(trained, stream=None, save=None)
        await self.load_weights(Weights(folder=trained.like, policy_version=policy_version, trained=received))

    async def load_weights(self, weights: Weights) -> None:
        """Loads them into every actor, and into actors that start later. Raises PipelineError if no actor runs."""
        open_session = partial(self._open_with, weights)
        await self._pool.update(open_session, "load_weights", weights, limit_s=LOAD_TIMEOUT_S)

    async def describe(self) -> list[Opened]:
        """What each actor has opened, except those that do not run; at least one. Raises PipelineError."""
        opened = [one for one in await self._pool.call_each("describe", limit_s=SLACK_S) if one is not None]
        if not opened:
            raise EngineError("every rollout actor was lost during its start; see their logs in Ray's dashboard")
        return opened

    @property
    def num_lost(self) -> int:
        """Actors that died or stopped responding, over the whole run."""
        return self._pool.num_lost

    def _episode_limit_s(self) -> float:
        settings = self._settings
        attempt_s = settings.reset_timeout_s + settings.episode_timeout_s + settings.evaluate_timeout_s
        return attempt_s * settings.max_env_attempts + SLACK_S

    def _lost_episode(self, task: Task, plan: EpisodePlan, losses: list[str], started_at: float) -> Episode:
        return Episode(
            episode_id=plan.episode_id,
            task_id=task.task_id,
            domain=task.domain,
            task_digest=task.config_digest,
            purpose=plan.purpose,
            checkpoint_id=plan.checkpoint_id,
            stage=plan.stage,
            engine=self._engine_name,
            sampling=plan.sampling,
            outcome=Outcome.POLICY_FAULT,
            error=losses[-1],
            context_mode=ContextMode(self._settings.agent.context_mode),
            group_id=plan.group_id,
            seed=plan.seed,
            attempt=len(losses) - 1,
            earlier_faults=tuple(losses[:-1]),
            stage_key=plan.stage_key,
            update=plan.update,
            max_turns=self._settings.max_turns,
            times_s={"total": time.time() - started_at},
            started_at=started_at,
            run_ids=dict(plan.run_ids),
        )


@asynccontextmanager
async def ray_rollouts(
    recipe: Recipe,
    state: StateDir,
    servers: EnvServers,
    weights: Weights,
    share: RayShare,
    *,
    purpose: str,
    max_turns: int,
    processor: Any = None,
    engine_token: str | None = None,
    engine: PolicyEngine | None = None,
) -> AsyncIterator[RayRollouts]:
    """Runs actors while a program needs episodes. sglang servers are probed once, by this program. `processor`: that of
    the weights. `engine`: replaces the recipe's engine; picklable.

    Raises:
        StoreError: the state's id cannot be written.
        EngineError: no actor starts, or the engine does not answer, or fails the parity probe.
        EnvServerError: no env server answers, or two differ in desktop image or grader.
    """
    require_reachable_engine(recipe)
    open_with = RecipeSession(
        recipe=recipe,
        shared=SharedState.of(state),
        servers=servers,
        max_turns=max_turns,
        run=purpose,
        engine_token=engine_token,
        engine=engine,
    )
    async with AsyncExitStack() as stack:
        served = None
        if engine is None and weights.folder is not None and recipe.engine.kind == "sglang":
            serving = served_weights(
                recipe,
                weights.folder,
                processor,
                state=state,
                run=purpose,
                policy_version=weights.policy_version,
                token=engine_token,
            )
            served = await stack.enter_async_context(serving)
        pool = await stack.enter_async_context(open_pool(partial(open_with, weights), share, purpose=purpose))
        yield RayRollouts(
            pool,
            open_with,
            settings=episode_settings(recipe, max_turns=max_turns),
            engine_name=recipe.engine.kind if engine is None else engine.name,
            served=served,
        )


def require_reachable_engine(recipe: Recipe) -> None:
    """Raises EngineError: this program would launch the policy servers for itself."""
    if recipe.engine.launch is not None:
        raise EngineError(
            "engine.launch starts policy servers that only this machine can reach, and rollout actors may run "
            "on others: start the servers separately and name them in engine.urls, or run without rollout actors"
        )
