"""The program inside a Ray actor that rolls out episodes: a rollout session, open as long as the actor.

This module needs no Ray: `ray_rollouts` starts this class as an actor.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from osworld_pipeline.domain.episode import Episode
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.domain.task import Task
from osworld_pipeline.protocols import GenerateRequest, GenerateResult
from osworld_pipeline.recipes import Recipe
from osworld_pipeline.rollout.run_episode import EpisodePlan, episode_runner
from osworld_pipeline.runs.rollouts.embedded_server import EnvServers
from osworld_pipeline.runs.rollouts.session import episode_settings, rollout_session


@dataclass(frozen=True, kw_only=True)
class Weights:
    folder: Path
    """A checkpoint that every node can read."""
    policy_version: int


class ActorSession(Protocol):
    """The open session of an actor."""

    async def run_episode(self, task: Task, plan: EpisodePlan) -> Episode: ...

    async def generate(self, request: GenerateRequest) -> GenerateResult: ...

    async def load_weights(self, weights: Weights) -> None: ...


OpenSession = Callable[[Weights, str], AbstractAsyncContextManager[ActorSession]]
"""Called in the actor with the weights and a client id of its own; picklable."""


@dataclass(frozen=True, kw_only=True)
class RecipeSession:
    """Opens the engine of the recipe: sglang servers by URL, or the actor's own engine with the weights."""

    recipe: Recipe
    state: StateDir
    servers: EnvServers
    max_turns: int
    run: str
    """The stage that the actors belong to."""
    engine_token: str | None = field(default=None, repr=False)

    @asynccontextmanager
    async def __call__(self, weights: Weights, purpose: str) -> AsyncIterator[ActorSession]:
        from osworld_pipeline.agent.processor import load_processor

        async with rollout_session(
            recipe=self.recipe,
            state=self.state,
            servers=self.servers,
            purpose=purpose,
            folder=weights.folder,
            processor=await asyncio.to_thread(load_processor, weights.folder),
            policy_version=weights.policy_version,
            adapters=self.recipe.trainer.lora,
            engine_token=self.engine_token,
            run=self.run,
            is_probed=self.recipe.engine.kind == "sglang",  # by the program that starts the actors
        ) as session:
            run_one = episode_runner(session.tools, episode_settings(self.recipe, max_turns=self.max_turns))

            class Opened:
                async def run_episode(self, task: Task, plan: EpisodePlan) -> Episode:
                    return await run_one(task, plan)

                async def generate(self, request: GenerateRequest) -> GenerateResult:
                    return await session.engine.generate(request)

                async def load_weights(self, weights: Weights) -> None:
                    await session.engine.load_weights(weights.folder, policy_version=weights.policy_version)

            yield Opened()


class RolloutActor:
    """The class that runs inside a Ray actor."""

    def __init__(self) -> None:
        self._stack = AsyncExitStack()
        self._session: ActorSession | None = None

    async def open(self, open_session: OpenSession, weights: Weights, purpose: str) -> None:
        self._session = await self._stack.enter_async_context(open_session(weights, purpose))

    async def run_episode(self, task: Task, plan: EpisodePlan) -> Episode:
        assert self._session is not None, "an actor is opened before it is used"
        return await self._session.run_episode(task, plan)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        assert self._session is not None, "an actor is opened before it is used"
        return await self._session.generate(request)

    async def load_weights(self, weights: Weights) -> None:
        assert self._session is not None, "an actor is opened before it is used"
        await self._session.load_weights(weights)

    async def close(self) -> None:
        await self._stack.aclose()


@dataclass(frozen=True, kw_only=True)
class ActorShape:
    """The number of actors, and the resources of each."""

    count: int
    cpus: float = 1.0
    gpus: float = 0.0
    start_timeout_s: float = 600.0
