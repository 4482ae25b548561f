"""A policy of bfloat16 weights with adapters, as a stage trains it, and what an engine samples from it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from train_on_ranks import demonstrations, recipe_of, save
from training_samples import conversation

from osworld_pipeline.domain.episode import SamplingParams
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.domain.trajectory import Trajectory
from osworld_pipeline.protocols import GenerateRequest
from osworld_pipeline.recipes import Recipe
from osworld_pipeline.recipes.schema import PretrainedModelSection
from osworld_pipeline.rollout.engines.transformers import TransformersEngine
from osworld_pipeline.training.distributed.process_group import ProcessGroup
from osworld_pipeline.training.distributed_trainer import DistributedTrainer
from osworld_pipeline.training.policy_trainer import open_gspo_trainer, open_sft_trainer
from osworld_pipeline.training.update import GspoTrainer
from osworld_pipeline.training.weights.checkpoint import latest_complete


def adapted_recipe(*, dtype: str | None = None, lora: dict[str, Any] | None = None, **gspo: Any) -> Recipe:
    """`dtype`: that of the weights under the adapters; None for the tiny model's float32. `lora`: changed keys."""
    recipe = recipe_of("lora", **gspo)
    if lora:
        assert recipe.trainer.lora is not None
        section = recipe.trainer.lora.model_copy(update=lora)
        recipe = recipe.model_copy(update={"trainer": recipe.trainer.model_copy(update={"lora": section})})
    if dtype is None:
        return recipe
    model = PretrainedModelSection.model_validate({"kind": "pretrained", "path": "-", "dtype": dtype})
    return recipe.model_copy(update={"model": model})


def without_adapters(recipe: Recipe) -> Recipe:
    return recipe.model_copy(update={"trainer": recipe.trainer.model_copy(update={"lora": None})})


def open_phase(folder: Path, recipe: Recipe, *, parent: Path | None = None, num_updates: int = 0) -> GspoTrainer:
    return open_gspo_trainer(
        folder,
        reference_folder=parent or folder,
        recipe=recipe,
        phase=recipe.gspo.phase1,
        process_group=ProcessGroup.alone(),
        num_updates=num_updates,
    )


def fine_tuned(folder: Path, recipe: Recipe, state: StateDir, name: str = "sft", *, num_updates: int = 2) -> Path:
    """A checkpoint of SFT on `folder`."""
    trainer = open_sft_trainer(folder, recipe=recipe, process_group=ProcessGroup.alone())
    for update in range(num_updates):
        trainer.update(demonstrations(trainer.processor, update))
    return saved(trainer, state, name)


def saved(trainer: DistributedTrainer, state: StateDir, name: str) -> Path:
    save(state, trainer, name, {})
    folder = latest_complete(state, name)
    assert folder is not None
    return folder


def factors(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items() if ".default." in name}


async def sampled(engine: TransformersEngine, processor: Any, update: int, num_updates: int) -> list[Trajectory]:
    """Answers to prompts that only this update has, with advantages of either sign."""
    trajectories = []
    for number in range(4):
        prompt = conversation(processor, 4 * update + number, num_turns=1)
        num_prompt = prompt.response_mask.index(1)
        request = GenerateRequest(
            token_ids=prompt.token_ids[:num_prompt],
            images=tuple(prompt.images),
            sampling=SamplingParams(temperature=1.0, max_new_tokens=12, seed=number, stop=()),
        )
        result = await engine.generate(request)
        num_sampled = len(result.token_ids)
        trajectories.append(
            replace(
                prompt,
                token_ids=(*request.token_ids, *result.token_ids),
                response_mask=(*[0] * num_prompt, *[1] * num_sampled),
                sampled_logprobs=(*[0.0] * num_prompt, *result.logprobs),
                policy_versions=(*[-1] * num_prompt, *[num_updates] * num_sampled),
                advantage=(-1.0) ** number,
            )
        )
    return trajectories
