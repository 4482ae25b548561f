"""Runs episodes on Ray actors: each has its own rollout session, on any node, and runs many episodes concurrently.

An actor that dies is replaced. Its episodes are faults, never rewards: each is run again on another actor, and the
losses are recorded with it. `ray_job`, which runs the program, connects to Ray.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from osworld_pipeline.domain.episode import ContextMode, Episode, Outcome
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.domain.task import Task
from osworld_pipeline.errors import EngineError, EnvServerError, PipelineError
from osworld_pipeline.protocols import GenerateRequest, GenerateResult
from osworld_pipeline.recipes import Recipe
from osworld_pipeline.rollout.run_episode import EpisodePlan, EpisodeSettings
from osworld_pipeline.runs.rollouts.embedded_server import EnvServers
from osworld_pipeline.runs.rollouts.ray_actor import ActorShape, OpenSession, RecipeSession, RolloutActor, Weights
from osworld_pipeline.runs.rollouts.session import episode_settings

Result = TypeVar("Result")
SLACK_S = 60.0
"""Extra time of a call for the round trip through Ray."""
LOAD_TIMEOUT_S = 600.0
"""For loading a checkpoint in an actor."""
MAX_CONCURRENCY = 1000
"""Limit of concurrent calls to one actor; the caller limits the number of concurrent episodes."""


@dataclass(eq=False)
class _Slot:
    """The place of one actor; a replacement takes the same slot."""

    index: int
    handle: Any = None
    num_running: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class RayRollouts:
    """A RunEpisode over several actors: `await rollouts(task, plan)`."""

    def __init__(
        self,
        open_session: OpenSession,
        weights: Weights,
        *,
        shape: ActorShape,
        purpose: str,
        settings: EpisodeSettings,
        engine_name: str,
    ) -> None:
        self._open_session = open_session
        self._weights = weights
        self._shape = shape
        self._purpose = purpose
        self._settings = settings
        self._engine_name = engine_name
        self._slots = [_Slot(index) for index in range(shape.count)]
        self.num_lost = 0
        """Actors that died or stopped responding, over the whole run."""

    async def __call__(self, task: Task, plan: EpisodePlan) -> Episode:
        """Returns the episode, with lost actors among its earlier faults; after `max_env_attempts` losses the outcome
        is policy_fault. Raises as run_episode."""
        losses: list[str] = []
        lost_on: set[int] = set()
        started_at = time.time()
        while len(losses) < self._settings.max_env_attempts:
            slot = min(self._slots, key=lambda slot: (slot.index in lost_on, slot.num_running))
            slot.num_running += 1
            try:
                episode = await self._run_once(slot, task, plan)
            except (_LostError, EngineError, EnvServerError) as error:
                losses.append(f"{Outcome.POLICY_FAULT} on rollout actor {slot.index}: {error}")
                lost_on.add(slot.index)
                continue
            finally:
                slot.num_running -= 1
            return replace(
                episode, attempt=episode.attempt + len(losses), earlier_faults=(*losses, *episode.earlier_faults)
            )
        return self._lost_episode(task, plan, losses, started_at)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """One response, from the actor with the fewest episodes. Raises EngineError."""
        slot = min(self._slots, key=lambda slot: slot.num_running)
        handle = await self._actor(slot)
        try:
            return await self._call(handle.generate.remote(request), self._settings.turn_timeout_s + SLACK_S)
        except _LostError as error:
            await self._discard(slot, handle)
            raise EngineError(f"rollout actor {slot.index} gave no response: {error}") from error

    async def load_weights(self, weights: Weights) -> None:
        """Loads them into every actor, and into actors that start later. Raises EngineError if an actor cannot be
        replaced."""
        self._weights = weights

        async def load(slot: _Slot) -> None:
            handle = await self._actor(slot)
            try:
                await self._call(handle.load_weights.remote(weights), LOAD_TIMEOUT_S)
            except _LostError:
                await self._discard(slot, handle)
                await self._actor(slot)

        await _gather([load(slot) for slot in self._slots])

    async def open(self) -> None:
        """Starts all actors at once. Raises EngineError."""
        await _gather([self._actor(slot) for slot in self._slots])

    async def close(self) -> None:
        """Idempotent; actors that still respond release their desktops."""
        import ray

        for slot in self._slots:
            handle, slot.handle = slot.handle, None
            if handle is not None:
                with suppress(_LostError, PipelineError):
                    await self._call(handle.close.remote(), SLACK_S)
                ray.kill(handle)

    async def _run_once(self, slot: _Slot, task: Task, plan: EpisodePlan) -> Episode:
        handle = await self._actor(slot)
        try:
            return await self._call(handle.run_episode.remote(task, plan), self._episode_limit_s())
        except _LostError:
            await self._discard(slot, handle)
            raise

    async def _actor(self, slot: _Slot) -> Any:
        """The slot's actor, started if there is none."""
        import ray

        async with slot.lock:
            if slot.handle is not None:
                return slot.handle
            shape = self._shape
            # SPREAD: across nodes, so that actors do not fill the bundle reserved for a training rank.
            actors: Any = ray.remote(RolloutActor)
            handle: Any = actors.options(
                num_cpus=shape.cpus, num_gpus=shape.gpus, scheduling_strategy="SPREAD", max_concurrency=MAX_CONCURRENCY
            ).remote()
            purpose = f"{self._purpose}-actor{slot.index}"
            try:
                opened = handle.open.remote(self._open_session, self._weights, purpose)
                await self._call(opened, shape.start_timeout_s)
            except _LostError as error:
                ray.kill(handle)
                raise EngineError(
                    f"rollout actor {slot.index} did not start ({error}): check that the cluster has {shape.cpus:g} "
                    f"CPUs and {shape.gpus:g} GPUs free for each of {shape.count} actors"
                ) from error
            except BaseException:
                ray.kill(handle)
                raise
            slot.handle = handle
            return handle

    async def _discard(self, slot: _Slot, handle: Any) -> None:
        import ray

        async with slot.lock:
            if slot.handle is handle:
                slot.handle = None
                self.num_lost += 1
                ray.kill(handle)  # an unresponsive actor must not continue

    async def _call(self, call: Any, limit_s: float) -> Any:
        """Returns the actor's result and re-raises our own exceptions unchanged. Raises _LostError."""
        import ray
        from ray.exceptions import RayActorError, RayError, RayTaskError

        try:
            async with asyncio.timeout(limit_s):
                return await call
        except TimeoutError as error:
            raise _LostError(f"it did not answer within {limit_s:.0f} s") from error
        except asyncio.CancelledError:
            ray.cancel(call)
            raise
        except RayTaskError as error:
            if isinstance(error.cause, PipelineError):
                raise error.cause from error
            raise
        except RayActorError as error:
            raise _LostError(f"it died ({_first_line(error)})") from error
        except RayError as error:
            raise _LostError(_first_line(error)) from error

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
    *,
    shape: ActorShape,
    purpose: str,
    max_turns: int,
    engine_token: str | None = None,
) -> AsyncIterator[RayRollouts]:
    """Runs actors while a program needs episodes.

    Raises:
        EngineError, EnvServerError: an actor does not start, or its engine or env servers do not answer.
    """
    rollouts = RayRollouts(
        RecipeSession(
            recipe=recipe, state=state, servers=servers, max_turns=max_turns, run=purpose, engine_token=engine_token
        ),
        weights,
        shape=shape,
        purpose=purpose,
        settings=episode_settings(recipe, max_turns=max_turns),
        engine_name=recipe.engine.kind,
    )
    try:
        await rollouts.open()
        yield rollouts
    finally:
        await rollouts.close()


class _LostError(Exception):
    """An actor died or stopped responding."""


async def _gather(calls: list[Awaitable[Any]]) -> None:
    """Awaits all of them; the first failure cancels the others and is raised unchanged."""
    try:
        async with asyncio.TaskGroup() as group:
            for call in calls:
                group.create_task(_as_coroutine(call))
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from failures


async def _as_coroutine(call: Awaitable[Result]) -> Result:
    return await call


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
