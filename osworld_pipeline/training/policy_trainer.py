"""Opens a trainer for a checkpoint folder, alone or as one of several ranks, new or resumed.

On rank 0 call `update`, `save` and `close` as in protocols.PolicyTrainer; on every other rank call `run_worker`, which
returns when rank 0 closes.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from osworld_pipeline.agent.adapters import Base, find_adapter, merge_line, whole_weights_folder
from osworld_pipeline.agent.model_inputs import PixelCache
from osworld_pipeline.agent.processor import load_processor
from osworld_pipeline.errors import RecipeError, StoreError
from osworld_pipeline.recipes import Recipe
from osworld_pipeline.recipes.schema import GspoPhaseSection
from osworld_pipeline.training.distributed.process_group import ProcessGroup
from osworld_pipeline.training.distributed.sharded_loading import empty_model, load_shards
from osworld_pipeline.training.distributed.sharding import shard_model
from osworld_pipeline.training.distributed.shared_trajectories import ReadImage
from osworld_pipeline.training.distributed_trainer import DistributedTrainer
from osworld_pipeline.training.memory.estimate import Stage
from osworld_pipeline.training.memory.fit import check_memory
from osworld_pipeline.training.model import dtype_of, load_policy
from osworld_pipeline.training.objective.score import FORWARD_METHOD, add_forward_method
from osworld_pipeline.training.packing import use_packed_attention
from osworld_pipeline.training.sft import SftTrainer
from osworld_pipeline.training.update import GspoTrainer
from osworld_pipeline.training.weights import lora
from osworld_pipeline.training.weights.checkpoint import load_optimizer
from osworld_pipeline.training.weights.manifest import verify_checkpoint
from osworld_pipeline.training.weights.weights_digest import weights_digest


def open_gspo_trainer(
    folder: Path,
    *,
    reference_folder: Path,
    recipe: Recipe,
    phase: GspoPhaseSection,
    process_group: ProcessGroup,
    num_updates: int = 0,
    cache: PixelCache | None = None,
    read_image: ReadImage | None = None,
    may_sample: bool = True,
) -> GspoTrainer:
    """`folder` holds the weights, and after `num_updates` also the optimiser's state; the reference (the phase's
    parent) is read only if gspo.kl_coef is above 0. `read_image`: reads a stored screenshot on this rank. `may_sample`:
    whether an engine of this program would run on rank 0's GPU.

    Raises:
        StoreError: a folder cannot be read, or is damaged.
        TrainingError: the recipe cannot fit this GPU.
        DependencyError: peft is missing for adapters.
        RecipeError: adapters for layers that do not exist or with other settings than those of `folder`, or an adapter
            in `folder` and no trainer.lora in the recipe.
    """
    if recipe.trainer.num_threads:
        torch.set_num_threads(recipe.trainer.num_threads)
    recipe = _without_dropout(recipe)
    _check_memory(folder, recipe, process_group, "gspo", may_sample=may_sample and process_group.is_main)
    has_reference = recipe.gspo.kl_coef > 0
    policy = _open_policy(
        folder, recipe, process_group, num_updates, seed=phase.seed, parent=reference_folder if has_reference else None
    )
    reference: Any = None
    # Under LoRA the policy's own model holds the parent: no second copy is needed.
    if has_reference and recipe.trainer.lora is None:
        reference = _open_reference(reference_folder, recipe, process_group)
    peak = phase.learning_rate or recipe.gspo.learning_rate
    trainer = GspoTrainer(
        policy.model,
        load_processor(folder),
        recipe.gspo.model_copy(update={"learning_rate": peak}),
        reference=reference,
        seed=phase.seed,
        section=recipe.trainer,
        process_group=process_group,
        num_updates=num_updates,
        cache=cache,
        base=policy.base,
        max_response_tokens=recipe.agent.max_response_tokens,
        phase_updates=phase.num_updates,
    )
    trainer.read_image = read_image
    _restore(trainer, folder)
    return trainer


def open_sft_trainer(
    folder: Path,
    *,
    recipe: Recipe,
    process_group: ProcessGroup,
    num_updates: int = 0,
    cache: PixelCache | None = None,
    read_image: ReadImage | None = None,
) -> SftTrainer:
    """Does the same as `open_gspo_trainer`, for recipe.sft. Raises StoreError, TrainingError, DependencyError,
    RecipeError."""
    _check_memory(folder, recipe, process_group, "sft")
    policy = _open_policy(folder, recipe, process_group, num_updates, seed=recipe.sft.seed)
    trainer = SftTrainer(
        policy.model,
        load_processor(folder),
        recipe.sft,
        section=recipe.trainer,
        process_group=process_group,
        num_updates=num_updates,
        cache=cache,
        base=policy.base,
    )
    trainer.read_image = read_image
    _restore(trainer, folder)
    return trainer


@dataclass(frozen=True, kw_only=True)
class _Policy:
    model: Any
    base: Base | None
    """The frozen weights under its adapters; on rank 0 only."""


def _without_dropout(recipe: Recipe) -> Recipe:
    """The recipe with LoRA dropout 0: an update compares its log-probabilities with the sampler's, and the sampler has
    no dropout."""
    section = recipe.trainer
    if section.lora is None or not section.lora.dropout:
        return recipe
    lora_section = section.lora.model_copy(update={"dropout": 0.0})
    return recipe.model_copy(update={"trainer": section.model_copy(update={"lora": lora_section})})


def _open_policy(
    folder: Path,
    recipe: Recipe,
    process_group: ProcessGroup,
    num_updates: int,
    *,
    seed: int,
    parent: Path | None = None,
) -> _Policy:
    """`parent`: of a phase with a KL term."""
    if process_group.is_main:
        verify_checkpoint(folder, is_required=num_updates > 0)
    section = recipe.trainer
    base: Base | None = None
    if section.lora is not None:
        model, base = _open_adapted(folder, recipe, process_group, is_resumed=num_updates > 0, seed=seed)
        if parent is not None:
            _hold_parent(model, parent, base)
    else:
        _require_no_adapter(folder)
        model = _open_model(folder, recipe, process_group)
        if not section.train_vision:
            model.model.visual.requires_grad_(False)
    if section.activation_checkpointing:
        model.activation_checkpointing_enable()
    _lay_out(model, recipe, process_group, whole_weights_folder(folder))
    return _Policy(model=model, base=base)


def _open_adapted(
    folder: Path, recipe: Recipe, process_group: ProcessGroup, *, is_resumed: bool, seed: int
) -> tuple[Any, Base | None]:
    """The adapter of `folder` on its base, or a new one on `folder`'s own weights; and the base, on rank 0."""
    section = recipe.trainer.lora
    assert section is not None, "checked by the caller"
    adapter = find_adapter(folder)
    if adapter is None and is_resumed:
        raise StoreError(
            f"{folder} holds whole weights, as earlier versions saved them under trainer.lora, and cannot be resumed: "
            f"remove {folder.parent} and run the stage again, or finish it with the version that started it"
        )
    if adapter is not None:
        lora.require_same_settings(adapter, section)
    base: Base | None = None
    if process_group.is_main:
        base = Base(folder=folder, digest=weights_digest(folder)) if adapter is None else lora.verified_base(adapter)
    model = _open_model(whole_weights_folder(folder), recipe, process_group)
    lora.add_adapters(model, section, seed=seed)
    if adapter is not None:
        lora.load_factors(model, adapter)
    return model, base


def _hold_parent(model: Any, parent: Path, base: Base | None) -> None:
    """Adds the reference of a phase to the policy's own model: the parent's adapter, or no adapter if it had none."""
    if not parent.is_dir():
        raise StoreError(f"{parent} is missing: gspo.kl_coef is above 0, so the phase's parent is needed; restore it")
    adapter = find_adapter(parent)
    if adapter is not None:
        lora.add_reference(model, adapter)
    whole = parent if adapter is None else adapter.base_folder
    if base is not None and whole.resolve() != base.folder.resolve() and weights_digest(whole) != base.digest:
        raise StoreError(
            f"the policy's adapter belongs to {base.folder}, and the phase's parent {parent} to other weights: "
            "restore the parent with which the phase began"
        )


def _require_no_adapter(folder: Path) -> None:
    adapter = find_adapter(folder)
    if adapter is not None:
        raise RecipeError(
            f"{folder} is an adapter of rank {adapter.rank} and alpha {adapter.alpha:g}, and the recipe has no "
            "trainer.lora: set trainer.lora to continue with the adapter; to train all weights, merge it first "
            f"({merge_line(folder)}) and start from the merged model"
        )


def _check_memory(
    folder: Path, recipe: Recipe, process_group: ProcessGroup, stage: Stage, *, may_sample: bool = False
) -> None:
    """Raises a clear error instead of a failed allocation minutes later; a CPU is never refused."""
    if process_group.device.type == "cuda":
        num_free, _ = torch.cuda.mem_get_info(process_group.device)
        check_memory(recipe, folder, stage=stage, gpu_bytes=num_free, may_sample=may_sample)


def _open_reference(folder: Path, recipe: Recipe, process_group: ProcessGroup) -> Any:
    model = _open_model(folder, recipe, process_group, is_frozen=True)
    _lay_out(model, recipe, process_group, folder)
    return model


def _open_model(folder: Path, recipe: Recipe, process_group: ProcessGroup, *, is_frozen: bool = False) -> Any:
    """A single rank loads the model; each of several ranks reads its own part after sharding (`_lay_out`)."""
    if process_group.is_alone:
        return load_policy(folder, recipe.model, device=process_group.device, is_frozen=is_frozen)
    return empty_model(folder, dtype=dtype_of(recipe.model), is_frozen=is_frozen)


def _lay_out(model: Any, recipe: Recipe, process_group: ProcessGroup, folder: Path) -> None:
    """`folder`: of the weights that a sharded model reads."""
    if recipe.trainer.batching == "packed":
        use_packed_attention(model)
    if not process_group.is_alone:
        add_forward_method(model)
    shard_model(model, process_group, forward_method=FORWARD_METHOD, cpu_offload=recipe.trainer.cpu_offload)
    if not process_group.is_alone:
        load_shards(model, folder, torch.device("cpu") if recipe.trainer.cpu_offload else process_group.device)


def _restore(trainer: DistributedTrainer, folder: Path) -> None:
    if trainer.num_updates:
        load_optimizer(folder, trainer.optimizer.state_dict())
        trainer.optimizer.restored()
