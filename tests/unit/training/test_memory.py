"""The estimate's formulas, against numbers worked by hand and against the code that they describe."""

from typing import Any

import pytest

from osworld_pipeline.recipes import Recipe, load_recipe
from osworld_pipeline.recipes.schema import LoraSection
from osworld_pipeline.rollout.engines import transformers_cache, transformers_sampler
from osworld_pipeline.training.memory import activations
from osworld_pipeline.training.memory import estimate as memory
from osworld_pipeline.training.memory.estimate import Estimate, estimate
from osworld_pipeline.training.memory.model_shapes import PUBLISHED
from osworld_pipeline.training.objective import loss

FOUR_B = PUBLISHED["Qwen/Qwen3-VL-4B-Instruct"]
TRAINED = 4_437_815_808 - 415_347_712
"""Of the 4B: all but the vision tower."""


def recipe(**sections: dict[str, Any]) -> Recipe:
    """areal_full with other values: one rank, no reference, an engine with a copy of the weights."""
    data = load_recipe("areal_full").model_dump(mode="json")
    data["trainer"]["num_processes"] = 1
    for name, values in sections.items():
        data[name] |= values
    return Recipe.model_validate(data)


def gpu(found: Estimate) -> dict[str, int]:
    return {item.name: item.gpu_bytes for item in found.items}


def host(found: Estimate) -> dict[str, int]:
    return {item.name: item.host_bytes for item in found.items}


def test_full_training_in_bfloat16_takes_twenty_bytes_a_parameter() -> None:
    """2 weight + 2 gradient + 4 master + 4 its gradient + 8 moments; the frozen vision tower takes only its 2."""
    found = gpu(estimate(recipe(), FOUR_B, "sft"))
    names = ("weights", "gradients", "master weights", "master gradients", "optimiser moments")
    assert sum(found[name] for name in names) == 20 * TRAINED + 2 * 415_347_712
    assert found["optimiser moments"] == 8 * TRAINED


def test_float32_weights_are_their_own_masters() -> None:
    found = gpu(estimate(recipe(model={"dtype": "float32"}), FOUR_B, "sft"))
    assert "master weights" not in found
    assert found["gradients"] == 4 * TRAINED


def test_four_ranks_hold_a_quarter_of_the_state_each_and_gather_two_layers_and_the_root() -> None:
    found = gpu(estimate(recipe(trainer={"num_processes": 4}), FOUR_B, "sft"))
    assert found["optimiser moments"] == 2 * TRAINED
    layer = 2560 * (4096 + 2 * 1024) + 4096 * 2560 + 3 * 2560 * 9728 + 2 * 2560 + 2 * 128
    text_root = 151_936 * 2560 + 2560
    vision_root = FOUR_B.vision.root_parameters
    assert found["gathered by FSDP2"] == 2 * (text_root + vision_root + 2 * layer) + 6 * text_root


def test_offloading_moves_the_state_to_the_host_and_leaves_the_passes() -> None:
    plain = estimate(recipe(trainer={"num_processes": 4}), FOUR_B, "sft")
    offloaded = estimate(recipe(trainer={"num_processes": 4, "cpu_offload": True}), FOUR_B, "sft")
    assert gpu(offloaded)["weights"] == 0
    assert host(offloaded)["weights"] == gpu(plain)["weights"]
    assert gpu(offloaded)["activations"] == gpu(plain)["activations"]


def test_a_reference_is_a_second_set_of_weights_only_with_kl_and_without_adapters() -> None:
    assert "reference model" not in gpu(estimate(recipe(), FOUR_B, "gspo"))
    assert gpu(estimate(recipe(gspo={"kl_coef": 0.1}), FOUR_B, "gspo"))["reference model"] == 2 * 4_437_815_808
    adapted = recipe(gspo={"kl_coef": 0.1}, trainer={"lora": {"rank": 32, "alpha": 64}})
    assert "reference model" not in gpu(estimate(adapted, FOUR_B, "gspo"))


def test_adapters_train_the_two_factors_of_each_layer_in_float32() -> None:
    """A layer with i inputs and o outputs has r (i + o) numbers; the seven of a 4B layer have 57,344 for each rank."""
    found = gpu(estimate(recipe(trainer={"lora": {"rank": 16, "alpha": 32}}), FOUR_B, "sft"))
    numbers = 36 * 16 * (2 * (2560 + 4096) + 2 * (2560 + 1024) + 3 * (2560 + 9728))
    assert numbers == 36 * 16 * 57_344
    assert (found["adapters"], found["gradients"], found["optimiser moments"]) == (
        4 * numbers,
        4 * numbers,
        8 * numbers,
    )


def test_an_engine_shares_the_model_only_where_nothing_trains_while_it_samples() -> None:
    copied = estimate(recipe(), FOUR_B, "gspo")
    assert gpu(copied)["engine's weights"] == 2 * 4_437_815_808
    shared = estimate(recipe(rollout={"mode": "synchronous"}), FOUR_B, "gspo")
    assert "engine's weights" not in gpu(shared)
    adapted = recipe(rollout={"mode": "synchronous"}, trainer={"lora": {"rank": 16, "alpha": 32}})
    assert "engine's weights" not in gpu(estimate(adapted, FOUR_B, "gspo"))
    assert not [name for name in gpu(estimate(recipe(), FOUR_B, "gspo", may_sample=False)) if "engine" in name]
    sglang = recipe(engine={"kind": "sglang", "urls": ["http://gpu-1:30000"]})
    assert not [name for name in gpu(estimate(sglang, FOUR_B, "gspo")) if "engine" in name]


def test_keys_and_values_of_the_4b_take_147_456_bytes_a_token() -> None:
    """2 x 36 layers x 8 heads x 128 x 2 bytes."""
    assert memory.kv_bytes(FOUR_B, num_tokens=1, num_bytes=2) == 147_456
    found = gpu(estimate(recipe(engine={"max_batch": 8}), FOUR_B, "gspo"))
    assert found["engine's keys and values"] == 8 * 16_384 * 147_456 + (256 << 20)


def test_one_layer_of_the_4b_keeps_170_112_bytes_a_token() -> None:
    """Norms 2 (4 + 4) 2560 + 6 x 5120; attention 4 x 5120 + 4 x 32; MLP 8 x 9728."""
    assert 40_960 + 30_720 + 20_480 + 128 + 77_824 == 170_112
    assert activations.text_layer_bytes(FOUR_B.text, num_tokens=1, num_bytes=2) == 170_112
    assert activations.text_checkpoint_bytes(FOUR_B.text, num_tokens=1, num_bytes=2) == 36 * 2 * 2560


def test_adapters_keep_their_inputs_in_float32() -> None:
    section = LoraSection(rank=16, target_modules=("down_proj",))
    kept = activations.lora_layer_bytes(FOUR_B.text, section, num_tokens=1, num_bytes=2)
    plain = activations.lora_layer_bytes(
        FOUR_B.text, LoraSection(rank=16, target_modules=("nothing",)), num_tokens=1, num_bytes=2
    )
    assert kept - plain == 4 * (9728 + 16)


def test_checkpointing_keeps_layer_inputs_and_one_layer_instead_of_all() -> None:
    kept = gpu(estimate(recipe(trainer={"activation_checkpointing": False}), FOUR_B, "sft"))["activations"]
    found = gpu(estimate(recipe(), FOUR_B, "sft"))
    assert kept == 16_384 * (36 * 170_112 + 8 * 2560 + 4 * 128)
    assert found["activations"] + found["recomputed layer"] == 16_384 * (36 * 5120 + 170_112 + 8 * 2560 + 4 * 128)


def test_logits_are_at_most_one_chunk() -> None:
    few = activations.logits_bytes(FOUR_B.text, num_tokens=10, num_bytes=2, max_chunk_logits=1 << 26)
    many = activations.logits_bytes(FOUR_B.text, num_tokens=9999, num_bytes=2, max_chunk_logits=1 << 26)
    assert few == 10 * 151_936 * 24
    assert many == 441 * 151_936 * 24


def test_fewer_pixels_and_fewer_screenshots_take_less() -> None:
    wide = gpu(estimate(recipe(), FOUR_B, "gspo"))["images"]
    assert gpu(estimate(recipe(agent={"max_pixels": 1_000_000}), FOUR_B, "gspo"))["images"] < wide
    assert gpu(estimate(recipe(agent={"window_screenshots": 2}), FOUR_B, "gspo"))["images"] < wide
    assert "images" not in gpu(estimate(recipe(agent={"show_screenshots": False}), FOUR_B, "gspo"))


def test_a_pass_of_gspo_holds_micro_batch_size_sequences_and_one_of_sft_its_budget() -> None:
    budget = {"max_tokens_per_batch": 65_536}
    names = ("activations", "recomputed layer")
    sft = gpu(estimate(recipe(trainer=budget), FOUR_B, "sft"))
    gspo = gpu(estimate(recipe(trainer=budget, gspo={"micro_batch_size": 2}), FOUR_B, "gspo"))
    for name in names:
        assert sft[name] == 2 * gspo[name]


def test_a_trained_vision_tower_keeps_its_blocks() -> None:
    frozen = gpu(estimate(recipe(), FOUR_B, "sft"))
    trained = gpu(estimate(recipe(trainer={"train_vision": True}), FOUR_B, "sft"))
    assert trained["vision tower"] > frozen["vision tower"]
    assert trained["optimiser moments"] == 8 * 4_437_815_808


def test_a_save_copies_the_weights_once_and_each_ranks_masters_and_moments() -> None:
    found = host(estimate(recipe(trainer={"num_processes": 4}), FOUR_B, "sft"))
    assert found["a checkpoint"] == 2 * 4_437_815_808 + 12 * TRAINED // 4


def test_a_save_of_adapters_copies_their_factors_and_moments_alone() -> None:
    found = host(estimate(recipe(trainer={"lora": {"rank": 16, "alpha": 32}}), FOUR_B, "sft"))
    assert found["a checkpoint"] == (4 + 8) * 36 * 16 * 57_344


@pytest.mark.parametrize(
    ("own", "source"),
    [
        (memory.MAX_CHUNK_LOGITS, loss.MAX_CHUNK_LOGITS),
        (memory.KV_GROWTH_TOKENS, transformers_cache.GROWTH),
        (memory.FEATURE_CACHE_BYTES, transformers_sampler.FEATURE_BYTES),
        (memory.MIN_SLOTS, transformers_sampler.MIN_ROWS),
    ],
)
def test_limits_of_the_estimate_equal_those_of_the_code_that_it_describes(own: int, source: int) -> None:
    assert own == source
