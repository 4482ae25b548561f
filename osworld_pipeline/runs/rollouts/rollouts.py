"""Runs the episodes of a program that only samples: in the program itself, or on Ray actors if its job names some."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from osworld_pipeline.domain.grounds import Grounds, all_grounds
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.protocols import PolicyEngine
from osworld_pipeline.recipes import Recipe
from osworld_pipeline.rollout.run_episode import RunEpisode, episode_runner
from osworld_pipeline.rollout.utilisation import BusyMeter
from osworld_pipeline.runs.messages import Report
from osworld_pipeline.runs.metrics.observing import observed_episodes, watching_meter
from osworld_pipeline.runs.placement import RayShare
from osworld_pipeline.runs.rollouts.embedded_server import EnvServers
from osworld_pipeline.runs.rollouts.ray_actor import Weights
from osworld_pipeline.runs.rollouts.ray_rollouts import ray_rollouts
from osworld_pipeline.runs.rollouts.session import episode_settings, rollout_session


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    run_one: RunEpisode
    engine_name: str
    uses_chat_api: bool
    """Whether the engine returns text without token ids."""
    grounds: frozenset[Grounds] | None
    """The images and graders of the env servers at the start; None if one of them does not report its own."""


@asynccontextmanager
async def open_rollouts(
    actors: RayShare | None,
    *,
    recipe: Recipe,
    state: StateDir,
    servers: EnvServers,
    purpose: str,
    max_turns: int,
    folder: Path | None = None,
    model: Any = None,
    processor: Any = None,
    engine_token: str | None = None,
    engine: PolicyEngine | None = None,
    report: Report,
) -> AsyncIterator[Rollouts]:
    """Does the same as rollout_session. `actors`: the share of a cluster whose actors run the episodes; None runs them
    here. Actors use neither `model`, because they have their own, nor `report`: they log. `engine` is picklable."""
    if actors is None:
        async with rollout_session(
            recipe=recipe,
            state=state,
            servers=servers,
            purpose=purpose,
            folder=folder,
            model=model,
            processor=processor,
            engine_token=engine_token,
            engine=engine,
            report=report,
        ) as session:
            run_here = episode_runner(session.tools, episode_settings(recipe, max_turns=max_turns))
            with _observing(run_here, servers) as run_one:
                yield Rollouts(
                    run_one=run_one,
                    engine_name=session.engine.name,
                    uses_chat_api=session.engine.uses_chat_api,
                    grounds=session.grounds(),
                )
        return
    async with ray_rollouts(
        recipe,
        state,
        servers,
        Weights(folder=folder),
        actors,
        purpose=purpose,
        max_turns=max_turns,
        processor=processor,
        engine_token=engine_token,
        engine=engine,
    ) as run_there:
        opened = await run_there.describe()
        with _observing(run_there, servers) as run_one:
            yield Rollouts(
                run_one=run_one,
                engine_name=opened[0].engine_name,
                uses_chat_api=opened[0].uses_chat_api,
                grounds=all_grounds(one.grounds for one in opened),
            )


@contextmanager
def _observing(run_one: RunEpisode, servers: EnvServers) -> Iterator[RunEpisode]:
    meter = BusyMeter(max(1, servers.num_replicas))
    with watching_meter("environments", meter):
        yield observed_episodes(run_one, meter)
