"""What the tests of several ranks run on each of them: trains a little and leaves checkpoints."""

import os
import signal
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from training_samples import Scripted, as_sampled, conversation

from osworld_pipeline.atomic_io import write_file
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.domain.trajectory import Trajectory
from osworld_pipeline.errors import PipelineError
from osworld_pipeline.recipes import Recipe
from osworld_pipeline.training.distributed.process_group import ProcessGroup
from osworld_pipeline.training.distributed_trainer import DistributedTrainer
from osworld_pipeline.training.model import load_model
from osworld_pipeline.training.policy_trainer import open_gspo_trainer, open_sft_trainer
from osworld_pipeline.training.weights.checkpoint import TrainerState, partials_dir, save_partial

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"train_vision": True, "activation_checkpointing": False},
    "offload": {"train_vision": True, "activation_checkpointing": False, "cpu_offload": True},
    "packed": {"train_vision": False, "activation_checkpointing": True, "batching": "packed"},
    "lora": {"activation_checkpointing": False, "batching": "packed", "lora": {"rank": 4, "alpha": 8.0}},
}


def recipe_of(variant: str, **gspo: Any) -> Recipe:
    shared = {
        "learning_rate": 1e-3,
        "clip_low": 0.2,
        "clip_high": 0.2,
        "kl_coef": 0.1,
        "max_grad_norm": 1.0,
        "micro_batch_size": 2,
        "minibatches_per_update": 2,
    }
    phase = {"num_updates": 4, "temperature": 1.0, "seed": 3}
    return Recipe.model_validate(
        {
            "name": "ranks",
            "model": {"kind": "tiny"},
            "agent": {"max_context_tokens": 256, "max_response_tokens": 32},
            "trainer": {"max_tokens_per_batch": 256, **VARIANTS[variant]},
            "sft": {"num_updates": 6, "learning_rate": 1e-3, "warmup_updates": 1},
            "gspo": {**shared, **gspo, "phase1": phase, "phase2": phase},
        }
    )


def demonstrations(processor: Any, update: int) -> list[Trajectory]:
    return [conversation(processor, update * 3 + number, num_turns=number % 3 + 1) for number in range(4)]


def rollouts(folder: Path, processor: Any, update: int, num_updates: int = 0) -> list[Trajectory]:
    """As the weights in `folder` would have sampled them."""
    model = load_model(folder)
    trajectories = as_sampled(model, processor, demonstrations(processor, update), [1.0, -1.0, 0.5, 0.0])
    versions = tuple([num_updates] * 999)
    return [replace(item, policy_versions=versions[: len(item.token_ids)]) for item in trajectories]


def save(state: StateDir, trainer: DistributedTrainer, name: str, metrics: dict[str, float]) -> None:
    trainer_state = TrainerState(
        checkpoint_id=name, parent_id=None, num_updates=trainer.num_updates, recipe={}, data_digest="", metrics=metrics
    )
    save_partial(state, trainer, trainer_state)
    trainer.wait_saved()


def keep(path: Path, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    torch.save({name: one.clone() for name, one in weights}, path)


def run(trainer: DistributedTrainer, process_group: ProcessGroup, work: Callable[[], None]) -> None:
    if not process_group.is_main:
        trainer.run_worker()
        return
    work()
    trainer.close()


def train(process_group: ProcessGroup, model: Path, out: Path, variant: str) -> None:
    recipe, state = recipe_of(variant), StateDir(out)
    sft = open_sft_trainer(model, recipe=recipe, process_group=process_group)

    def fine_tune() -> None:
        metrics = [sft.update(demonstrations(sft.processor, update)) for update in range(2)]
        save(state, sft, "sft", metrics[-1])

    run(sft, process_group, fine_tune)
    # A phase whose parent has an adapter holds that one, too.
    parent = model if recipe.trainer.lora is None else partials_dir(state, "sft") / "update-0002"
    gspo = open_gspo_trainer(
        parent, reference_folder=parent, recipe=recipe, phase=recipe.gspo.phase1, process_group=process_group
    )

    def reinforce() -> None:
        save(state, gspo, "gspo", gspo.update(rollouts(parent, gspo.processor, 0)))
        gspo.save_weights(out / "weights-0001")()
        gspo.send_weights(partial(keep, out / "sent.pt"))
        torch.save({name: tensor.clone() for name, tensor in gspo.weights().items()}, out / "weights.pt")
        # The next update starts before its weights have reached the servers.
        stale = [replace(one, policy_versions=(0,) * len(one.token_ids)) for one in rollouts(parent, gspo.processor, 1)]
        canary = rollouts(out / "weights-0001", gspo.processor, 2, 1)[0]
        arrivals = Scripted(
            [(2, partial(keep, out / "between-0.pt")), (99, partial(keep, out / "between-1.pt"))],
            lambda: [replace(canary, trajectory_id="canary", advantage=0.0, is_canary=True)],
        )
        save(state, gspo, "gspo-late", gspo.update(stale, arrivals))

    run(gspo, process_group, reinforce)
    resume(process_group, out, out, variant)
    alone = out.parent.parent / "alone" / variant
    if not process_group.is_alone and alone.is_dir():
        resume(process_group, alone, out / "of-one-rank", variant)


def resume(process_group: ProcessGroup, source: Path, out: Path, variant: str) -> None:
    """Continues from the checkpoints in `source`, no matter which ranks wrote them."""
    recipe, state = recipe_of(variant), StateDir(out)
    folder = partials_dir(StateDir(source), "sft") / "update-0002"
    sft = open_sft_trainer(folder, recipe=recipe, process_group=process_group, num_updates=2)

    def fine_tune() -> None:
        save(state, sft, "sft-resumed", sft.update(demonstrations(sft.processor, 2)))

    run(sft, process_group, fine_tune)


def train_endlessly(process_group: ProcessGroup, model: Path, out: Path) -> None:
    """Trains until a rank is killed; rank 0 writes down the error that it gets."""
    trainer = open_sft_trainer(model, recipe=recipe_of("plain"), process_group=process_group)
    trajectories = demonstrations(trainer.processor, 0)
    out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun ends the other ranks; the error must come without it

    pids = process_group.gather(os.getpid())

    def work() -> None:
        while True:
            trainer.update(trajectories)
            write_file(out / "rank-1.pid", str(pids[1]).encode())

    try:
        run(trainer, process_group, work)
    except PipelineError as error:
        (out / f"rank-{process_group.rank}.error").write_text(str(error))
        raise SystemExit(2) from error
