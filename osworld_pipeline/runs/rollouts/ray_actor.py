"""The session inside a Ray actor that rolls out episodes; it is open as long as the actor. This module needs no Ray."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from osworld_pipeline.domain.episode import Episode
from osworld_pipeline.domain.grounds import Grounds
from osworld_pipeline.domain.task import Task
from osworld_pipeline.protocols import GenerateRequest, GenerateResult, PolicyEngine
from osworld_pipeline.recipes import Recipe
from osworld_pipeline.rollout.engines.sglang_weights import TrainedWeights
from osworld_pipeline.rollout.run_episode import EpisodePlan, episode_runner
from osworld_pipeline.runs.rollouts.embedded_server import EnvServers
from osworld_pipeline.runs.rollouts.session import episode_settings, load_engine, rollout_session
from osworld_pipeline.runs.shared_state import SharedState


@dataclass(frozen=True, kw_only=True)
class Weights:
    folder: Path | None
    """A checkpoint that every node can read; None for an engine with weights of its own."""
    policy_version: int = 0
    trained: TrainedWeights | None = None
    """Weights that the trainer's program sends to the servers, instead of those in `folder`."""


@dataclass(frozen=True, kw_only=True)
class Opened:
    """What an actor has opened."""

    engine_name: str
    uses_chat_api: bool
    grounds: frozenset[Grounds] | None
    """The same as RolloutSession.grounds."""


class ActorSession(Protocol):
    """The open session of an actor."""

    async def describe(self) -> Opened: ...

    async def run_episode(self, task: Task, plan: EpisodePlan) -> Episode: ...

    async def generate(self, request: GenerateRequest) -> GenerateResult: ...

    async def load_weights(self, weights: Weights) -> None: ...


@dataclass(frozen=True, kw_only=True)
class RecipeSession:
    """Opens the engine of the recipe: sglang servers by URL, or the actor's own engine with the weights."""

    recipe: Recipe
    shared: SharedState
    servers: EnvServers
    max_turns: int
    run: str
    """The stage that the actors belong to."""
    engine_token: str | None = field(default=None, repr=False)
    engine: PolicyEngine | None = None
    """Replaces the recipe's engine; picklable."""

    @asynccontextmanager
    async def __call__(self, weights: Weights, purpose: str) -> AsyncIterator[ActorSession]:
        from osworld_pipeline.agent.processor import load_processor

        state = await asyncio.to_thread(self.shared.here)
        weights = self._here(weights)
        folder = weights.folder
        async with rollout_session(
            recipe=self.recipe,
            state=state,
            servers=self.servers,
            purpose=purpose,
            folder=folder,
            processor=None if folder is None else await asyncio.to_thread(load_processor, folder),
            trained=weights.trained,
            policy_version=weights.policy_version,
            adapters=self.recipe.trainer.lora,
            engine_token=self.engine_token,
            engine=self.engine,
            run=self.run,
            is_probed=self.recipe.engine.kind == "sglang",  # by the program that starts the actors
        ) as session:
            run_one = episode_runner(session.tools, episode_settings(self.recipe, max_turns=self.max_turns))
            here = self._here

            class Session:
                async def describe(self) -> Opened:
                    return Opened(
                        engine_name=session.engine.name,
                        uses_chat_api=session.engine.uses_chat_api,
                        grounds=session.grounds(),
                    )

                async def run_episode(self, task: Task, plan: EpisodePlan) -> Episode:
                    return await run_one(task, plan)

                async def generate(self, request: GenerateRequest) -> GenerateResult:
                    return await session.engine.generate(request)

                async def load_weights(self, weights: Weights) -> None:
                    weights = here(weights)
                    assert weights.folder is not None, "only a trainer hands over weights"
                    await load_engine(
                        session.engine, weights.folder, weights.trained, policy_version=weights.policy_version
                    )

            yield Session()

    def _here(self, weights: Weights) -> Weights:
        """With their paths on this host. Raises StoreError."""
        folder, trained = weights.folder, weights.trained
        return replace(
            weights,
            folder=None if folder is None else self.shared.path_here(folder),
            trained=None if trained is None else replace(trained, like=self.shared.path_here(trained.like)),
        )
