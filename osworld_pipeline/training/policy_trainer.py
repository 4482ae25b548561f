"""Opens a trainer over a checkpoint folder, alone or as one of several ranks, fresh or where it was left.

On rank 0 call `update`, `save` and `close` as protocols.PolicyTrainer says; on every other rank call `follow`, which
returns when rank 0 closes.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from osworld_pipeline.agent.model_inputs import PixelCache
from osworld_pipeline.agent.processor import load_processor
from osworld_pipeline.recipes import Recipe
from osworld_pipeline.recipes.schema import GspoPhaseSection
from osworld_pipeline.training import lora
from osworld_pipeline.training.checkpoint import load_optimizer
from osworld_pipeline.training.manifest import verify_checkpoint
from osworld_pipeline.training.memory import Stage
from osworld_pipeline.training.memory_fit import check_memory
from osworld_pipeline.training.model import load_policy
from osworld_pipeline.training.packing import use_packed_attention
from osworld_pipeline.training.ranked import RankedTrainer
from osworld_pipeline.training.ranks import Ranks
from osworld_pipeline.training.score import FORWARD_METHOD, add_forward_method
from osworld_pipeline.training.sft import SftTrainer
from osworld_pipeline.training.sharding import shard_model
from osworld_pipeline.training.update import GspoTrainer


def open_gspo_trainer(
    folder: Path,
    *,
    reference_folder: Path,
    recipe: Recipe,
    phase: GspoPhaseSection,
    ranks: Ranks,
    num_updates: int = 0,
    cache: PixelCache | None = None,
) -> GspoTrainer:
    """`folder` holds the weights, and where `num_updates` lie behind them the optimiser's state too; the reference (the
    phase's parent) is read only where gspo.kl_coef is above 0.

    Raises:
        StoreError: a folder cannot be read, or is damaged.
        TrainingError: the recipe cannot fit this GPU.
        DependencyError, RecipeError: adapters without peft, or for layers that do not exist.
    """
    if recipe.trainer.num_threads:
        torch.set_num_threads(recipe.trainer.num_threads)
    _check_memory(folder, recipe, ranks, "gspo")
    policy = _open_policy(folder, recipe, ranks, num_updates, seed=phase.seed)
    reference: Any = None
    # Under LoRA the policy without its adapters is the parent: no second copy is needed.
    if recipe.gspo.kl_coef > 0 and recipe.trainer.lora is None:
        reference = _open_reference(reference_folder, recipe, ranks)
    trainer = GspoTrainer(
        policy.model,
        load_processor(folder),
        recipe.gspo,
        reference=reference,
        seed=phase.seed,
        section=recipe.trainer,
        ranks=ranks,
        num_updates=num_updates,
        cache=cache,
        base_folder=policy.base_folder,
        max_response_tokens=recipe.agent.max_response_tokens,
    )
    _restore(trainer, folder)
    return trainer


def open_sft_trainer(
    folder: Path, *, recipe: Recipe, ranks: Ranks, num_updates: int = 0, cache: PixelCache | None = None
) -> SftTrainer:
    """As `open_gspo_trainer`, for recipe.sft. Raises StoreError, TrainingError, DependencyError, RecipeError."""
    _check_memory(folder, recipe, ranks, "sft")
    policy = _open_policy(folder, recipe, ranks, num_updates, seed=recipe.sft.seed)
    trainer = SftTrainer(
        policy.model,
        load_processor(folder),
        recipe.sft,
        section=recipe.trainer,
        ranks=ranks,
        num_updates=num_updates,
        cache=cache,
        base_folder=policy.base_folder,
    )
    _restore(trainer, folder)
    return trainer


@dataclass(frozen=True, kw_only=True)
class _Policy:
    model: Any
    base_folder: Path
    """Where its weights, or those under its adapters, were read."""


def _open_policy(folder: Path, recipe: Recipe, ranks: Ranks, num_updates: int, *, seed: int) -> _Policy:
    if ranks.is_main:
        verify_checkpoint(folder, is_required=num_updates > 0)
    section = recipe.trainer
    base_folder = folder
    if section.lora is not None and num_updates:
        base_folder = lora.base_folder_of(folder / lora.FOLDER)
    model = load_policy(base_folder, recipe.model, device=_loading_device(ranks))
    if section.lora is not None:
        lora.add_adapters(model, section.lora, seed=seed)
        if num_updates:
            lora.load_adapter(model, folder / lora.FOLDER)
    elif not section.train_vision:
        model.model.visual.requires_grad_(False)
    if section.activation_checkpointing:
        model.activation_checkpointing_enable()
    _lay_out(model, recipe, ranks)
    return _Policy(model=model, base_folder=base_folder)


def _check_memory(folder: Path, recipe: Recipe, ranks: Ranks, stage: Stage) -> None:
    """One clear error instead of an allocation that fails minutes later; a CPU is never refused."""
    if ranks.device.type == "cuda":
        num_free, _ = torch.cuda.mem_get_info(ranks.device)
        check_memory(recipe, folder, stage=stage, gpu_bytes=num_free)


def _open_reference(folder: Path, recipe: Recipe, ranks: Ranks) -> Any:
    model = load_policy(folder, recipe.model, device=_loading_device(ranks), is_frozen=True)
    _lay_out(model, recipe, ranks)
    return model


def _lay_out(model: Any, recipe: Recipe, ranks: Ranks) -> None:
    if recipe.trainer.batching == "packed":
        use_packed_attention(model)
    if not ranks.is_alone:
        add_forward_method(model)
    shard_model(model, ranks, forward_method=FORWARD_METHOD, cpu_offload=recipe.trainer.cpu_offload)


def _loading_device(ranks: Ranks) -> torch.device:
    """Sharding takes the weights from host memory, so that a whole model never needs to fit one device."""
    return ranks.device if ranks.is_alone else torch.device("cpu")


def _restore(trainer: RankedTrainer, folder: Path) -> None:
    if trainer.num_updates:
        load_optimizer(folder, trainer.optimizer.state_dict())
        trainer.optimizer.restored()
