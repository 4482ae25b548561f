"""The number of parameters follows from sizes alone, for published models and for tiny ones."""

import json
from pathlib import Path

import pytest
import torch
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from osworld_pipeline.errors import StoreError
from osworld_pipeline.recipes.schema import PretrainedModelSection, TinyModelSection
from osworld_pipeline.training.memory.model_shapes import PUBLISHED, ModelShape, shape_of
from osworld_pipeline.training.model import load_model


@pytest.mark.parametrize(("size", "parameters"), [("2B", 2_127_532_032), ("4B", 4_437_815_808), ("8B", 8_767_123_696)])
def test_published_sizes_give_the_published_number_of_parameters(size: str, parameters: int) -> None:
    assert PUBLISHED[f"Qwen/Qwen3-VL-{size}-Instruct"].parameters == parameters


def published_config(*, is_tied: bool = True) -> Qwen3VLConfig:
    return Qwen3VLConfig(
        text_config={
            "hidden_size": 2560,
            "intermediate_size": 9728,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151_936,
            "tie_word_embeddings": is_tied,
        },
        vision_config={
            "depth": 24,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_heads": 16,
            "out_hidden_size": 2560,
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": [5, 11, 17],
        },
        tie_word_embeddings=is_tied,
    )


@pytest.mark.parametrize("is_tied", [True, False])
def test_parameters_by_group_are_those_that_transformers_makes(is_tied: bool) -> None:
    config = published_config(is_tied=is_tied)
    with torch.device("meta"):
        model = Qwen3VLForConditionalGeneration(config)
    model.tie_weights()
    shape = ModelShape.of_config(config.to_dict())

    def count(module: torch.nn.Module) -> int:
        return sum(param.numel() for param in module.parameters())

    assert shape.parameters == count(model)
    assert shape.vision.parameters == count(model.model.visual)
    assert shape.text.layer_parameters == count(model.model.language_model.layers[0])
    assert shape.vision.block_parameters == count(model.model.visual.blocks[0])


def test_a_folder_gives_the_sizes_of_its_own_config(tiny_folder: Path) -> None:
    shape = ModelShape.of_folder(tiny_folder)
    assert shape.parameters == sum(param.numel() for param in load_model(tiny_folder).parameters())


def test_the_size_of_a_tiny_model_is_known_before_it_is_built_and_never_too_small(tiny_folder: Path) -> None:
    section = TinyModelSection(
        kind="tiny", hidden_size=64, num_layers=2, vision_hidden_size=48, vision_depth=1, vocab_size=400, seed=1
    )
    shape, built = shape_of(section), ModelShape.of_folder(tiny_folder)
    assert shape is not None
    assert shape.vision == built.vision
    assert shape.parameters >= built.parameters


def test_a_published_model_is_recognised_by_its_hub_id_and_by_its_folder(tmp_path: Path) -> None:
    by_id = shape_of(PretrainedModelSection(kind="pretrained", path="Qwen/Qwen3-VL-4B-Instruct"))
    (tmp_path / "config.json").write_text(json.dumps(published_config().to_dict(), default=str))
    assert shape_of(PretrainedModelSection(kind="pretrained", path=str(tmp_path))) == by_id
    assert shape_of(PretrainedModelSection(kind="pretrained", path="somebody/else")) is None


def test_a_config_without_sizes_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(StoreError, match="does not contain the sizes of a Qwen3-VL"):
        ModelShape.of_folder(tmp_path)
