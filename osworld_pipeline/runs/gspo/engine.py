"""Samples the policy of a GSPO phase and hands over the trainer's weights: with an engine in this program, or with Ray
actors that have an engine each."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from osworld_pipeline.agent.model_inputs import PixelCache
from osworld_pipeline.agent.renderer import Renderer
from osworld_pipeline.errors import EngineError
from osworld_pipeline.rollout.canary import Generate
from osworld_pipeline.rollout.engines.sglang_weights import TrainedWeights
from osworld_pipeline.rollout.run_episode import RunEpisode, episode_runner
from osworld_pipeline.rollout.utilisation import BusyMeter, Utilisation
from osworld_pipeline.runs.gspo.job import GspoJob, ResumePoint
from osworld_pipeline.runs.gspo.trainer_thread import TrainerThread
from osworld_pipeline.runs.gspo.weights import (
    Broadcast,
    Handover,
    InMemory,
    InPlace,
    LoadTrained,
    LoadWeights,
    ThroughFolder,
    Write,
    shares_model,
)
from osworld_pipeline.runs.messages import Report
from osworld_pipeline.runs.parity.probe import ParityReport
from osworld_pipeline.runs.rollouts.ray_actor import Weights
from osworld_pipeline.runs.rollouts.ray_rollouts import ray_rollouts
from osworld_pipeline.runs.rollouts.session import RolloutSession, episode_settings, rollout_session
from osworld_pipeline.store import TrajectoryStore

if TYPE_CHECKING:
    from osworld_pipeline.training.update import GspoTrainer


@dataclass(frozen=True, kw_only=True)
class PhaseRollouts:
    run_one: RunEpisode
    generate: Generate
    """Generates one response with the engine, or with one of the engines, that sample the episodes."""
    handover: Handover
    store: TrajectoryStore
    renderer: Renderer
    utilisation: Utilisation
    parity: ParityReport | None = None
    """Parity of the engine at the start; None if it was not probed, or if each actor probes its own."""


@asynccontextmanager
async def open_rollouts(
    job: GspoJob,
    trainer: "GspoTrainer",
    thread: TrainerThread,
    point: ResumePoint,
    cache: PixelCache,
    report: Report,
) -> AsyncIterator[PhaseRollouts]:
    """Opens the engine with the weights of `point`; it receives later weights through `handover`, until the block ends.
    `thread`: the thread that may call the trainer. `report`: receives warnings; actors log them instead.

    Raises:
        EnvServerError: no env server answers, or two differ in desktop image or grader; names them.
        EngineError: the engine does not answer, fails the parity probe, or its responses cannot be trained on.
    """
    if job.actors is not None:
        async with _on_actors(job, trainer, thread, point) as rollouts:
            yield rollouts
        return
    async with rollout_session(
        recipe=job.recipe,
        state=job.state,
        servers=job.servers,
        purpose=job.checkpoint_id,
        folder=point.folder,
        model=trainer.model if shares_model(job.recipe, trainer) else None,
        processor=trainer.processor,
        policy_version=point.num_updates,
        cache=cache,
        adapters=job.recipe.trainer.lora,
        engine_token=job.engine_token,
        report=report,
    ) as session:
        settings = episode_settings(job.recipe, max_turns=job.recipe.agent.max_turns)
        if session.engine.uses_chat_api or session.renderer is None:
            raise EngineError(
                f"the {session.engine.name} engine returns text without token ids and log-probabilities, so its "
                "responses cannot be trained on: set engine.kind to transformers or sglang"
            )
        yield PhaseRollouts(
            run_one=episode_runner(session.tools, settings),
            generate=session.engine.generate,
            handover=_open_handover(job, session, trainer, thread),
            store=session.store,
            renderer=session.renderer,
            utilisation=session.utilisation,
            parity=session.parity,
        )


@asynccontextmanager
async def _on_actors(
    job: GspoJob, trainer: "GspoTrainer", thread: TrainerThread, point: ResumePoint
) -> AsyncIterator[PhaseRollouts]:
    assert job.actors is not None, "checked by the caller"
    async with ray_rollouts(
        job.recipe,
        job.state,
        job.servers,
        Weights(folder=point.folder, policy_version=point.num_updates),
        job.actors,
        purpose=job.checkpoint_id,
        max_turns=job.recipe.agent.max_turns,
        processor=trainer.processor,
        engine_token=job.engine_token,
    ) as actors:

        async def load(folder: Path, policy_version: int) -> None:
            await actors.load_weights(Weights(folder=folder, policy_version=policy_version))

        async def load_trained(trained: TrainedWeights, policy_version: int) -> None:
            await actors.load_trained(trained, policy_version=policy_version)

        yield PhaseRollouts(
            run_one=actors,
            generate=actors.generate,
            handover=_to_servers(job, trainer, thread, load, load_trained),
            store=TrajectoryStore(job.state),
            renderer=Renderer(trainer.processor),
            utilisation=Utilisation(environments=BusyMeter(max(1, job.servers.num_replicas))),
            parity=actors.parity,
        )


def _open_handover(job: GspoJob, session: RolloutSession, trainer: "GspoTrainer", thread: TrainerThread) -> Handover:
    if shares_model(job.recipe, trainer):
        return InPlace(session.engine)
    if job.recipe.engine.kind == "transformers":
        return InMemory(session.engine, partial(thread, trainer.weights))

    async def load(folder: Path, policy_version: int) -> None:
        await session.engine.load_weights(folder, policy_version=policy_version)

    async def load_trained(trained: TrainedWeights, policy_version: int) -> None:
        from osworld_pipeline.rollout.engines.sglang import SglangEngine

        assert isinstance(session.engine, SglangEngine), "required by engine.weights"
        await session.engine.load_trained(trained, policy_version=policy_version)

    return _to_servers(job, trainer, thread, load, load_trained)


def _to_servers(
    job: GspoJob,
    trainer: "GspoTrainer",
    thread: TrainerThread,
    load: LoadWeights,
    load_trained: LoadTrained,
) -> Handover:
    from osworld_pipeline.training.weights.checkpoint import partials_dir

    parent = partials_dir(job.state, job.checkpoint_id)
    if job.recipe.engine.weights != "broadcast":

        async def begin(folder: Path) -> Write:
            return await thread(partial(trainer.save_weights, folder))

        return ThroughFolder(load, begin, parent)

    async def save(policy_version: int, folder: Path) -> None:
        await thread.run_with(trainer, policy_version, lambda: trainer.save_weights(folder)())

    return Broadcast(
        load_trained,
        partial(thread.send, trainer),
        save,
        like=job.parent_folder,
        num_bytes=trainer.num_weight_bytes,
        trains_vision=job.recipe.trainer.train_vision,
        parent=parent,
    )
