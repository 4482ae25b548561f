"""Everything that a program needs to run episodes: the recipe's policy engine, connections to env servers, the
store."""

import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from osworld_pipeline.agent.model_inputs import PixelCache
from osworld_pipeline.agent.renderer import Renderer
from osworld_pipeline.dialects import load_dialect
from osworld_pipeline.domain.episode import SamplingParams
from osworld_pipeline.domain.grounds import Grounds
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.policy_servers.launch import launched_servers
from osworld_pipeline.protocols import PolicyEngine
from osworld_pipeline.recipes import Recipe
from osworld_pipeline.recipes.engine_names import TRANSFORMERS
from osworld_pipeline.recipes.schema import LoraSection
from osworld_pipeline.rollout.canary import Generate
from osworld_pipeline.rollout.engines.sglang_weights import TrainedWeights
from osworld_pipeline.rollout.run_episode import EpisodeSettings, EpisodeTools
from osworld_pipeline.rollout.utilisation import BusyMeter, MeteredEngine, Utilisation
from osworld_pipeline.runs.messages import Report, Warned
from osworld_pipeline.runs.metrics.observing import watching_meter
from osworld_pipeline.runs.parity.newcomer import newcomer_check
from osworld_pipeline.runs.parity.probe import ParityReport, probe_parity
from osworld_pipeline.runs.rollouts.embedded_server import EnvServers
from osworld_pipeline.runs.rollouts.engine_kinds import EngineRequest, load_frozen, open_engine
from osworld_pipeline.runs.rollouts.env_servers import open_env_client
from osworld_pipeline.runs.shared_state import state_name
from osworld_pipeline.store.trajectories import TrajectoryStore

if TYPE_CHECKING:
    from osworld_pipeline.rollout.engines.sglang import SglangEngine

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RolloutSession:
    tools: EpisodeTools
    engine: PolicyEngine
    """The engine that `tools.engine` wraps and measures."""
    store: TrajectoryStore
    renderer: Renderer | None
    """None for a chat engine without a processor."""
    utilisation: Utilisation
    grounds: Callable[[], frozenset[Grounds] | None]
    """The images and graders of the env servers in use; None if one of them does not report its own."""
    parity: ParityReport | None = None
    """None if the engine was not probed."""


@asynccontextmanager
async def rollout_session(
    *,
    recipe: Recipe,
    state: StateDir,
    servers: EnvServers,
    purpose: str,
    folder: Path | None = None,
    trained: TrainedWeights | None = None,
    model: Any = None,
    processor: Any = None,
    policy_version: int = 0,
    cache: PixelCache | None = None,
    adapters: LoraSection | None = None,
    engine_token: str | None = None,
    engine: PolicyEngine | None = None,
    run: str | None = None,
    is_probed: bool = False,
    report: Report | None = None,
) -> AsyncIterator[RolloutSession]:
    """Opens the session. Checks that the engine and at least one env server answer, and that the engine samples from
    the given weights. Policy servers that the recipe launches (`engine.launch`) run until the session ends.

    `folder`: a checkpoint that the engine loads, unless `trained` names weights that the engine's servers receive from
    the trainer's program. `model`: an engine in this process samples from it instead. A chat engine needs neither, and
    no processor. `adapters`: the adapters whose factors the engine will receive, if a trainer trains them. `engine`:
    replaces the recipe's engine. `purpose`: see `open_env_client`. `run`: shared by sessions that load the same
    sequence of weights; None for `purpose`. `is_probed`: this run has already probed the engine's servers. `report`:
    receives warnings about servers that join later; None logs them.

    Raises:
        EnvServerError, StoreError: as open_env_client.
        EngineError: the engine does not answer, or fails the parity probe; names it.
        RecipeError: there is no policy to sample from.
    """
    renderer = None if processor is None else Renderer(processor)
    store = TrajectoryStore(state)
    async with AsyncExitStack() as stack:
        if engine is None and folder is not None:
            recipe = await stack.enter_async_context(launched_servers(recipe, state, folder))
        engine = engine or open_engine(
            EngineRequest(
                recipe=recipe, folder=folder, model=model, processor=processor, policy_version=policy_version,
                cache=cache, adapters=adapters, token=engine_token, owner=_owner_of(state, run or purpose),
            )
        )  # fmt: skip
        stack.push_async_callback(engine.close)
        client = await stack.enter_async_context(open_env_client(recipe, state, servers, purpose=purpose))
        await engine.health()
        if recipe.engine.kind != TRANSFORMERS and not engine.uses_chat_api and folder is not None:
            await load_engine(engine, folder, trained, policy_version=policy_version)
        parity = await _probe(recipe, engine, renderer, folder=folder, model=model, is_probed=is_probed, report=report)
        utilisation = Utilisation(environments=BusyMeter(max(1, servers.num_replicas)))
        stack.enter_context(watching_meter("engine", utilisation.engine))
        tools = EpisodeTools(
            desktop_factory=client.desktop,
            engine=MeteredEngine(engine, utilisation.engine),
            renderer=renderer,
            sink=store,
            parity=parity,
        )
        yield RolloutSession(
            tools=tools,
            engine=engine,
            store=store,
            renderer=renderer,
            utilisation=utilisation,
            grounds=client.fleet.grounds,
            parity=parity,
        )


async def _probe(
    recipe: Recipe,
    engine: PolicyEngine,
    renderer: Renderer | None,
    *,
    folder: Path | None,
    model: Any,
    is_probed: bool = False,
    report: Report | None = None,
) -> ParityReport | None:
    """`model`: the model to compare with; None selects the engine's own or the one in the folder. sglang servers that
    join later are compared before they are used; with `is_probed`, so are all that have not passed in this run.

    Returns None if the recipe disables the probe, if there is no model to compare with, and with `is_probed`. Raises as
    probe_parity.
    """
    if not recipe.engine.parity_probe or engine.uses_chat_api or renderer is None or (model is None and folder is None):
        return None
    from osworld_pipeline.rollout.engines.sglang import SglangEngine
    from osworld_pipeline.rollout.engines.transformers import TransformersEngine

    if model is None and isinstance(engine, TransformersEngine):
        model = engine.model
    servers = engine.by_server() if isinstance(engine, SglangEngine) and not is_probed else {}
    generators: Mapping[str, Generate] = {f"the sglang server at {url}": one for url, one in servers.items()}
    parity = None
    if not is_probed:
        parity = await probe_parity(
            engine,
            generators or {f"the {engine.name} engine": engine.generate},
            recipe=recipe,
            renderer=renderer,
            load_reference=lambda device: model if model is not None else load_frozen(recipe, folder, device=device),
        )
    if isinstance(engine, SglangEngine):
        check = newcomer_check(recipe, renderer, load=lambda path: load_frozen(recipe, path, device="cpu"))
        await engine.compare_newcomers(check, passed=servers, warn=partial(_warn, report))
    return parity


def _warn(report: Report | None, message: str) -> None:
    if report is None:
        log.warning(message)
    else:
        report(Warned(message=message))


async def load_engine(
    engine: PolicyEngine, folder: Path, trained: TrainedWeights | None, *, policy_version: int
) -> None:
    """Loads the weights of `folder`, or waits for `trained` ones. Raises EngineError."""
    from osworld_pipeline.rollout.engines.sglang import SglangEngine

    if trained is not None and isinstance(engine, SglangEngine):
        await engine.load_trained(trained, policy_version=policy_version)
    else:
        await engine.load_weights(folder, policy_version=policy_version)


@dataclass(frozen=True, kw_only=True)
class ServedWeights:
    engine: "SglangEngine"
    parity: ParityReport | None
    """None if the recipe disables the probe."""


@asynccontextmanager
async def served_weights(
    recipe: Recipe,
    folder: Path,
    processor: Any,
    *,
    state: StateDir,
    run: str,
    policy_version: int,
    token: str | None,
) -> AsyncIterator[ServedWeights]:
    """Loads a checkpoint into the recipe's sglang servers and probes them, for sessions elsewhere with `is_probed` and
    this `run`. The engine can give the servers other weights until the block ends.

    Raises:
        EngineError: a server does not answer, or fails the probe; names it.
    """
    from osworld_pipeline.rollout.engines.sglang import SglangEngine

    engine = open_engine(
        EngineRequest(
            recipe=recipe, folder=folder, processor=processor, policy_version=policy_version, token=token,
            owner=_owner_of(state, run),
        )
    )  # fmt: skip
    assert isinstance(engine, SglangEngine), "checked by the caller"
    try:
        await engine.health()
        await engine.load_weights(folder, policy_version=policy_version)
        parity = await _probe(recipe, engine, Renderer(processor), folder=folder, model=None)
        yield ServedWeights(engine=engine, parity=parity)
    finally:
        await engine.close()


def _owner_of(state: StateDir, run: str) -> str:
    """The name under which policy servers know the engines of a run."""
    return f"{state_name(state)}:{run}"


def episode_settings(recipe: Recipe, *, max_turns: int) -> EpisodeSettings:
    """Limits of an episode from the recipe."""
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
    """Sampling parameters of an episode: responses end at the stop strings of its dialect."""
    return SamplingParams(
        temperature=temperature,
        top_p=top_p,
        max_new_tokens=recipe.agent.max_response_tokens,
        stop=load_dialect(recipe.agent.dialect, recipe.agent.coordinate_space).stop,
        seed=seed,
    )


def num_slots(recipe: Recipe, servers: EnvServers) -> int:
    """Number of concurrent episodes."""
    return recipe.rollout.max_concurrent_episodes or max(1, servers.num_replicas)
