"""Shipped recipes fit the GPUs that they claim; what cannot fit is refused by name, with what would make it fit."""

import re
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch

from osworld_pipeline.errors import TrainingError
from osworld_pipeline.recipes import Recipe, load_recipe, recipe_names
from osworld_pipeline.training import policy_trainer
from osworld_pipeline.training.distributed.process_group import ProcessGroup
from osworld_pipeline.training.memory.estimate import GB, largest_estimate
from osworld_pipeline.training.memory.fit import Fit, check_memory, judge
from osworld_pipeline.training.memory.model_shapes import shape_of

PUBLISHED = [name for name in recipe_names() if load_recipe(name).model.kind == "pretrained"]
CLAIM = re.compile(r"Fits (\d+) GPUs? of (\d+) GB")


def first_comment(name: str) -> str:
    text = (resources.files("osworld_pipeline.recipes") / f"{name}.toml").read_text()
    lines = text[: text.index("\n\n")].splitlines()
    return " ".join(line.removeprefix("#").strip() for line in lines)


def with_keys(name: str, **sections: dict[str, Any]) -> Recipe:
    data = load_recipe(name).model_dump(mode="json")
    for section, values in sections.items():
        data[section] |= values
    return Recipe.model_validate(data)


def judged(recipe: Recipe, gpu_gb: float) -> Fit:
    shape = shape_of(recipe.model)
    assert shape is not None
    return judge(recipe, shape, gpu_bytes=int(gpu_gb * GB))


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_shipped_recipe_fits_the_gpus_that_its_comment_claims(name: str) -> None:
    claim = CLAIM.search(first_comment(name))
    assert claim is not None, f"{name}.toml does not say in its first comment which GPUs it fits"
    recipe = load_recipe(name)
    assert recipe.trainer.num_processes == int(claim[1])
    assert judged(recipe, int(claim[2])).is_ok


def test_areal_full_on_one_gpu_of_80_gb_is_refused_with_what_would_make_it_fit() -> None:
    fit = judged(with_keys("areal_full", trainer={"num_processes": 1}), 80)
    assert not fit.is_ok
    assert "does not fit 80.0 GB" in fit.sentence
    proposed = {key for remedy in fit.remedies for key in remedy.change}
    assert {"trainer.num_processes", "trainer.cpu_offload", "trainer.lora"} <= proposed


def test_every_remedy_makes_the_recipe_fit_when_it_is_set() -> None:
    fit = judged(with_keys("areal_full", trainer={"num_processes": 1}), 80)
    for remedy in fit.remedies:
        settings = [f"trainer.num_processes={remedy.change.get('trainer.num_processes', 1)}", *remedy.text.split(", ")]
        if "{" in remedy.text:
            settings = ["trainer.num_processes=1", remedy.text]
        changed = load_recipe("areal_full", settings=settings)
        shape = shape_of(changed.model)
        assert shape is not None
        assert largest_estimate(changed, shape).gpu_bytes == remedy.gpu_bytes <= 80 * GB


def test_where_no_single_change_is_enough_several_are_proposed_together() -> None:
    fit = judged(with_keys("areal_full", trainer={"num_processes": 1}), 40)
    assert len(fit.remedies) == 1
    assert len(fit.remedies[0].change) > 1
    assert fit.remedies[0].gpu_bytes <= 40 * GB


def test_shorter_contexts_fewer_pixels_and_checkpointing_are_proposed_where_they_are_enough() -> None:
    recipe = with_keys(
        "qwen3vl_4b_lora",
        trainer={"activation_checkpointing": False, "max_tokens_per_batch": 16_384},
        engine={"kind": "sglang", "urls": ["http://gpu-1:30000"]},
    )
    needed = judged(recipe, 1000).estimate.gpu_bytes / GB
    proposed = {key for remedy in judged(recipe, needed - 1).remedies for key in remedy.change}
    assert {"trainer.activation_checkpointing", "trainer.max_tokens_per_batch"} <= proposed


def test_a_recipe_that_no_change_makes_fit_is_reported_as_such() -> None:
    fit = judged(load_recipe("qwen3vl_4b_lora"), 2)
    assert fit.remedies == ()
    assert "larger GPUs" in fit.advice


def test_without_a_gpu_the_check_says_how_much_memory_is_needed() -> None:
    recipe = load_recipe("qwen3vl_4b")
    shape = shape_of(recipe.model)
    assert shape is not None
    fit = judge(recipe, shape, gpu_bytes=None)
    assert fit.is_ok
    assert re.fullmatch(r"qwen3vl_4b needs \d+\.\d GB of each of 4 GPUs \(gspo\)", fit.sentence)


def test_a_trainer_that_does_not_fit_is_refused_before_anything_is_loaded(tiny_folder: Path) -> None:
    recipe = load_recipe("smoke")
    with pytest.raises(TrainingError, match=r"smoke needs .* of 1 GPU \(sft\), which does not fit 0\.5 GB"):
        check_memory(recipe, tiny_folder, stage="sft", gpu_bytes=int(0.5 * GB))
    unchecked = with_keys("smoke", trainer={"check_memory": False})
    check_memory(unchecked, tiny_folder, stage="sft", gpu_bytes=int(0.5 * GB))


def test_a_trainer_on_a_gpu_checks_against_its_free_memory(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 2000))
    recipe, process_group = load_recipe("smoke"), ProcessGroup.alone("cuda")
    with pytest.raises(TrainingError, match="smoke needs"):
        policy_trainer.open_sft_trainer(tiny_folder, recipe=recipe, process_group=process_group)
    with pytest.raises(TrainingError, match="smoke needs"):
        policy_trainer.open_gspo_trainer(
            tiny_folder,
            reference_folder=tiny_folder,
            recipe=recipe,
            phase=recipe.gspo.phase1,
            process_group=process_group,
        )
