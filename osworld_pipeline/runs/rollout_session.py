"""What a program needs to run episodes: the policy engine its recipe names, connections to env servers, the store."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from osworld_pipeline.agent.adapters import whole_weights_folder
from osworld_pipeline.agent.dialects import load_dialect
from osworld_pipeline.agent.model_inputs import PixelCache
from osworld_pipeline.agent.renderer import Renderer
from osworld_pipeline.domain.episode import SamplingParams
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import RecipeError
from osworld_pipeline.protocols import PolicyEngine
from osworld_pipeline.recipes import Recipe
from osworld_pipeline.recipes.schema import LoraSection
from osworld_pipeline.rollout.run_episode import EpisodeSettings, EpisodeTools
from osworld_pipeline.rollout.utilisation import BusyMeter, MeteredEngine, Utilisation
from osworld_pipeline.runs.embedded_server import EnvServers
from osworld_pipeline.runs.env_servers import open_env_client
from osworld_pipeline.runs.grounds import Grounds, grounds_of_servers
from osworld_pipeline.trajectories.store import TrajectoryStore


@dataclass(frozen=True, kw_only=True)
class RolloutSession:
    tools: EpisodeTools
    engine: PolicyEngine
    """The one behind `tools.engine`, which only measures it."""
    store: TrajectoryStore
    renderer: Renderer | None
    """None for an engine of words that came without a processor."""
    utilisation: Utilisation
    grounds: Callable[[], Awaitable[frozenset[Grounds] | None]]
    """Asks the env servers for their images and graders; None where one of them does not say."""


@asynccontextmanager
async def rollout_session(
    *,
    recipe: Recipe,
    state: StateDir,
    servers: EnvServers,
    purpose: str,
    folder: Path | None = None,
    model: Any = None,
    processor: Any = None,
    policy_version: int = 0,
    cache: PixelCache | None = None,
    adapters: LoraSection | None = None,
    engine_token: str | None = None,
    engine: PolicyEngine | None = None,
    run: str | None = None,
) -> AsyncIterator[RolloutSession]:
    """Opens the session and checks that the engine and every env server answer.

    `folder`: a checkpoint, which the engine loads; or `model`, which an engine in this process samples from as it is.
    An engine of words needs neither, nor a processor. `adapters`: whose factors the engine will be given, where a
    trainer trains them. `engine`: one to take instead of the recipe's. `purpose`: see `open_env_client`. `run`: what
    sessions have in common that go from weights to weights together; None for `purpose`.

    Raises:
        EnvServerError, EngineError: one does not answer; names it.
        RecipeError: there is no policy to sample from.
    """
    renderer = None if processor is None else Renderer(processor)
    store = TrajectoryStore(state)
    async with AsyncExitStack() as stack:
        engine = engine or _open_engine(
            recipe, folder=folder, model=model, processor=processor, version=policy_version, cache=cache,
            adapters=adapters, token=engine_token, owner=f"{state.root.resolve()}:{run or purpose}",
        )  # fmt: skip
        stack.push_async_callback(engine.close)
        client = await stack.enter_async_context(open_env_client(recipe, state, servers, purpose=purpose))
        await engine.health()
        if recipe.engine.kind == "sglang" and folder is not None:
            await engine.load_weights(folder, policy_version=policy_version)
        utilisation = Utilisation(environments=BusyMeter(max(1, servers.num_replicas)))
        tools = EpisodeTools(
            desktop_factory=client.desktop,
            engine=MeteredEngine(engine, utilisation.engine),
            renderer=renderer,
            sink=store,
        )
        yield RolloutSession(
            tools=tools,
            engine=engine,
            store=store,
            renderer=renderer,
            utilisation=utilisation,
            grounds=partial(grounds_of_servers, client),
        )


def _open_engine(
    recipe: Recipe,
    *,
    folder: Path | None,
    model: Any,
    processor: Any,
    version: int,
    cache: PixelCache | None,
    adapters: LoraSection | None,
    token: str | None,
    owner: str,
) -> PolicyEngine:
    section = recipe.engine
    if section.kind == "openai":
        from osworld_pipeline.rollout.engines.openai import OpenAiEngine

        return OpenAiEngine(section.urls[0], section=section, token=token)
    if processor is None or (model is None and folder is None):
        raise RecipeError(f"engine.kind {section.kind} samples from a checkpoint, and there is none")
    if section.kind == "sglang":
        from osworld_pipeline.rollout.engines.sglang import SglangEngine
        from osworld_pipeline.rollout.engines.sglang_weights import vocab_size_of

        if folder is None:
            raise RecipeError("engine.kind sglang samples from a checkpoint's folder, and there is none")
        return SglangEngine(
            section.urls,
            renderer=Renderer(processor),
            section=section,
            vocab_size=vocab_size_of(folder),
            owner=owner,
            policy_version=version,
            token=token,
        )
    from osworld_pipeline.rollout.engines.transformers import TransformersEngine

    return TransformersEngine(
        model if model is not None else _load(recipe, folder, adapters),
        processor,
        device=_device(model),
        policy_version=version,
        timeout_s=recipe.gspo.turn_timeout_s,
        max_batch=section.max_batch,
        reuse_kv_cache=section.reuse_kv_cache,
        cache=cache,
        base_folder=None if folder is None else whole_weights_folder(folder),
    )


def _load(recipe: Recipe, folder: Path | None, adapters: LoraSection | None) -> Any:
    from osworld_pipeline.training.model import load_policy

    assert folder is not None, "a model or a folder was asked for above"
    return load_policy(folder, recipe.model, device=_device(None), is_frozen=True, adapters=adapters)


def _device(model: Any) -> Any:
    """Where the model is, or where one of our own would go."""
    import torch

    if model is not None:
        return next(model.parameters()).device
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


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


def sampling_params(recipe: Recipe, *, temperature: float, top_p: float = 1.0, seed: int) -> SamplingParams:
    """How an episode is sampled: responses end where its dialect's do."""
    return SamplingParams(
        temperature=temperature,
        top_p=top_p,
        max_new_tokens=recipe.agent.max_response_tokens,
        stop=load_dialect(recipe.agent.dialect, recipe.agent.coordinate_space).stop,
        seed=seed,
    )


def num_slots(recipe: Recipe, servers: EnvServers) -> int:
    """Episodes in flight."""
    return recipe.rollout.max_concurrent_episodes or max(1, servers.num_replicas)
