"""What a program needs to run episodes: a model in process, connections to env servers, the trajectory store."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from osworld_pipeline.agent.model_inputs import PixelCache
from osworld_pipeline.agent.renderer import Renderer
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.recipes import Recipe
from osworld_pipeline.rollout.env_client import EnvClient, EnvTimeouts
from osworld_pipeline.rollout.run_episode import EpisodeSettings, EpisodeTools
from osworld_pipeline.runs.embedded_server import EnvServers
from osworld_pipeline.trajectories.store import TrajectoryStore
from osworld_pipeline.wire import EnvConfig

if TYPE_CHECKING:
    from osworld_pipeline.rollout.engines.transformers import TransformersEngine


@dataclass(frozen=True, kw_only=True)
class RolloutSession:
    tools: EpisodeTools
    engine: "TransformersEngine"
    store: TrajectoryStore
    renderer: Renderer


@asynccontextmanager
async def rollout_session(
    *,
    recipe: Recipe,
    state: StateDir,
    servers: EnvServers,
    model: Any,
    processor: Any,
    client_id: str,
    policy_version: int = 0,
    cache: PixelCache | None = None,
) -> AsyncIterator[RolloutSession]:
    """Opens the session and checks that every env server answers.

    Raises:
        EnvServerError: one does not; names it.
    """
    from osworld_pipeline.rollout.engines.transformers import TransformersEngine

    renderer = Renderer(processor)
    store = TrajectoryStore(state)
    engine = TransformersEngine(
        model,
        processor,
        policy_version=policy_version,
        timeout_s=recipe.gspo.turn_timeout_s,
        max_batch=max(1, recipe.desktop.num_replicas),
        cache=cache,
    )
    client = EnvClient(
        servers.urls,
        token=servers.token,
        client_id=client_id,
        env_config=env_config(recipe),
        timeouts=EnvTimeouts(request_s=recipe.gspo.turn_timeout_s),
    )
    try:
        await client.health()
        tools = EpisodeTools(desktop_factory=client.desktop, engine=engine, renderer=renderer, sink=store)
        yield RolloutSession(tools=tools, engine=engine, store=store, renderer=renderer)
    finally:
        await engine.close()
        await client.close()


def env_config(recipe: Recipe) -> EnvConfig:
    desktop = recipe.desktop
    return EnvConfig(
        screen_size=(desktop.screen_width, desktop.screen_height),
        require_a11y_tree=desktop.require_a11y_tree,
        require_terminal=desktop.require_terminal,
    )


def episode_settings(recipe: Recipe, *, max_turns: int) -> EpisodeSettings:
    """Limits of an episode as the recipe sets them."""
    return EpisodeSettings(
        agent=recipe.agent,
        desktop=recipe.desktop,
        reward=recipe.reward,
        max_turns=max_turns,
        episode_timeout_s=recipe.gspo.episode_timeout_s,
        turn_timeout_s=recipe.gspo.turn_timeout_s,
        max_env_attempts=recipe.gspo.max_env_attempts,
    )
