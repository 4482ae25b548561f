"""The engine samples with exactly what the trainer has learned: adapters are handed over unchanged, and no part of a
small step is lost to rounding in bfloat16."""

from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_samples import adapted_recipe, factors, fine_tuned, open_phase, sampled, without_adapters

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import EngineError
from osworld_pipeline.recipes import Recipe
from osworld_pipeline.rollout.engines.transformers import TransformersEngine
from osworld_pipeline.runs.gspo.weights import shares_model
from osworld_pipeline.runs.rollouts.engine_kinds import EngineRequest, open_engine
from osworld_pipeline.training.objective.score import score_trajectories
from osworld_pipeline.training.update import GspoTrainer

SMALL_STEPS: dict[str, Any] = {"learning_rate": 1e-5, "max_logprob_diff": 0.05, "kl_coef": 0.0}
BFLOAT16_NOISE = 0.02
"""Mean difference of log-probabilities between two ways through the same weights; one per cent of them is 0.0039."""


def mean_difference(trainer: GspoTrainer, trajectories: Any) -> float:
    rows = score_trajectories(trainer.model, trainer.processor, trajectories)
    pairs = [
        (float(own), sampled)
        for row, one in zip(rows, trajectories, strict=True)
        for own, sampled, mask in zip(row, one.sampled_logprobs, one.response_mask, strict=True)
        if mask
    ]
    return sum(abs(own - sampled) for own, sampled in pairs) / len(pairs)


def open_copy(recipe: Recipe, folder: Path, processor: Any) -> Any:
    """Opens a separate engine, as a phase does."""
    return open_engine(EngineRequest(recipe=recipe, folder=folder, processor=processor, adapters=recipe.trainer.lora))


async def test_a_synchronous_engine_samples_from_the_trainers_own_adapters(tiny_folder: Path):
    recipe = adapted_recipe(dtype="bfloat16", **SMALL_STEPS | {"learning_rate": 1e-2})
    trainer = open_phase(tiny_folder, recipe)
    assert shares_model(recipe, trainer)
    engine = TransformersEngine(trainer.model, trainer.processor, timeout_s=60)
    before = await sampled(engine, trainer.processor, 9, 0)
    for update in range(4):
        trainer.update(await sampled(engine, trainer.processor, update, update))
        engine.mark_updated(policy_version=update + 1)
    after = await sampled(engine, trainer.processor, 9, 4)
    await engine.close()
    assert mean_difference(trainer, after) < BFLOAT16_NOISE
    assert mean_difference(trainer, before) > 10 * BFLOAT16_NOISE, "the updates changed nothing that could be seen"


async def test_a_separate_engine_gets_bit_identical_factors(tiny_folder: Path):
    recipe = adapted_recipe(dtype="bfloat16", **SMALL_STEPS)
    trainer = open_phase(tiny_folder, recipe)
    engine = open_copy(recipe, tiny_folder, trainer.processor)
    for update in range(4):
        trainer.update(await sampled(engine, trainer.processor, update, update))
        handed_over = trainer.weights()
        assert set(handed_over) == set(factors(trainer.model)), "the factors travel, and nothing else"
        await engine.load_state(handed_over, policy_version=update + 1)
    theirs, ours = factors(engine._model), factors(trainer.model)
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in ours)
    assert all(tensor.dtype == torch.float32 for tensor in theirs.values())
    assert any(bool(tensor.any()) for name, tensor in theirs.items() if ".lora_B." in name), "nothing was learned"
    after = await sampled(engine, trainer.processor, 9, 4)
    await engine.close()
    assert mean_difference(trainer, after) < BFLOAT16_NOISE


async def test_a_separate_engine_continues_from_a_parent_with_an_adapter(tmp_path: Path, tiny_folder: Path):
    recipe = adapted_recipe(dtype="bfloat16", **SMALL_STEPS)
    parent = fine_tuned(tiny_folder, recipe, StateDir(tmp_path))
    trainer = open_phase(parent, recipe)
    engine = open_copy(recipe, parent, trainer.processor)
    trainer.update(await sampled(engine, trainer.processor, 0, 0))
    await engine.load_state(trainer.weights(), policy_version=1)
    theirs, ours = factors(engine._model), factors(trainer.model)
    assert all(torch.equal(theirs[name], ours[name]) for name in ours)
    await engine.close()


async def test_a_folder_handed_over_holds_the_adapter_alone_and_an_engine_loads_it(tmp_path: Path, tiny_folder: Path):
    recipe = adapted_recipe(dtype="bfloat16", **SMALL_STEPS)
    trainer = open_phase(tiny_folder, recipe)
    engine = open_copy(recipe, tiny_folder, trainer.processor)
    trainer.update(await sampled(engine, trainer.processor, 0, 0))
    folder = tmp_path / "weights-0001"
    trainer.save_weights(folder)()
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    adapter = {"adapter/adapter_config.json", "adapter/adapter_model.safetensors", "adapter/base.json"}
    assert adapter | {"config.json", "tokenizer.json"} <= names
    assert [name for name in names if name.endswith((".safetensors", ".distcp"))] == [
        "adapter/adapter_model.safetensors"
    ]
    await engine.load_weights(folder, policy_version=1)
    assert engine.policy_version == 1
    theirs, ours = factors(engine._model), factors(trainer.model)
    assert all(torch.equal(theirs[name], ours[name]) for name in ours)
    await engine.close()


async def test_an_adapter_that_does_not_belong_to_the_engines_model_is_refused(tmp_path: Path, tiny_folder: Path):
    recipe = adapted_recipe()
    adapter = fine_tuned(tiny_folder, recipe, StateDir(tmp_path), num_updates=1)
    trainer = open_phase(tiny_folder, recipe)
    plain = TransformersEngine(open_phase(tiny_folder, without_adapters(recipe)).model, trainer.processor)
    with pytest.raises(EngineError, match=r"0001: it is an adapter, and the model has no adapter to load it into"):
        await plain.load_weights(adapter, policy_version=1)
    stranger = TransformersEngine(trainer.model, trainer.processor, base_folder=tmp_path / "other")
    with pytest.raises(EngineError, match=r"it is an adapter of .*, and the model was read from .*other"):
        await stranger.load_weights(adapter, policy_version=1)
    louder = open_phase(tiny_folder, adapted_recipe(lora={"alpha": 4.0}))
    with pytest.raises(EngineError, match=r"its adapter has alpha 8, and the model's has 4"):
        await TransformersEngine(louder.model, trainer.processor).load_weights(adapter, policy_version=1)
