"""A model filled from its files equals a whole load; test_two_ranks.py tests this on two ranks."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from osworld_pipeline.errors import StoreError
from osworld_pipeline.recipes.schema import LoraSection
from osworld_pipeline.training.distributed.sharded_loading import empty_model, load_shards
from osworld_pipeline.training.model import load_model
from osworld_pipeline.training.weights import lora

CPU = torch.device("cpu")


def test_a_model_filled_from_its_files_is_the_model_that_was_stored(tiny_folder: Path) -> None:
    whole, filled = load_model(tiny_folder), empty_model(tiny_folder, dtype=torch.float32)
    assert all(param.is_meta for param in filled.parameters())
    num_bytes = load_shards(filled, tiny_folder, CPU)
    assert num_bytes == sum(param.nbytes for param in whole.parameters())
    expected, found = whole.state_dict(), filled.state_dict()
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], tensor) for name, tensor in found.items())
    assert filled.lm_head.weight is filled.model.language_model.embed_tokens.weight
    buffers = dict(filled.named_buffers())
    assert all(torch.equal(buffers[name], buffer) for name, buffer in whole.named_buffers())
    assert [name for name, _ in whole.named_parameters()] == [name for name, _ in filled.named_parameters()]
    assert whole.generation_config.to_dict() == filled.generation_config.to_dict()


def test_adapters_of_a_seed_are_the_same_before_and_after_the_weights_are_loaded(tiny_folder: Path) -> None:
    whole, filled = load_model(tiny_folder), empty_model(tiny_folder, dtype=torch.float32)
    for model in (whole, filled):
        lora.add_adapters(model, LoraSection(rank=4), seed=3)
    load_shards(filled, tiny_folder, CPU)
    found = filled.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in whole.state_dict().items())
    trained = {name: param.requires_grad for name, param in filled.named_parameters()}
    assert trained == {name: param.requires_grad for name, param in whole.named_parameters()}


def test_weights_are_loaded_in_the_recipes_dtype_and_a_frozen_model_stays_frozen(tiny_folder: Path) -> None:
    model = empty_model(tiny_folder, dtype=torch.bfloat16, is_frozen=True)
    load_shards(model, tiny_folder, CPU)
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
    assert not any(param.requires_grad for param in model.parameters())
    whole = load_model(tiny_folder, dtype="bfloat16")
    assert torch.equal(model.lm_head.weight, whole.lm_head.weight)


def test_weights_of_another_model_are_refused_by_name(tiny_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_folder, tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    weights = load_file(path)
    name = "model.language_model.norm.weight"
    save_file({**weights, name: torch.zeros(3)}, path)
    with pytest.raises(StoreError, match=rf"of another model: {name} is \(3,\), not \(64,\)"):
        load_shards(empty_model(tmp_path / "model", dtype=torch.float32), tmp_path / "model", CPU)
    del weights[name]
    save_file(weights, path)
    with pytest.raises(StoreError, match=rf"of another model, with missing or unknown names: {name}"):
        load_shards(empty_model(tmp_path / "model", dtype=torch.float32), tmp_path / "model", CPU)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(StoreError, match="cannot be read"):
        load_shards(empty_model(tmp_path / "model", dtype=torch.float32), tmp_path / "model", CPU)


def test_a_folder_without_a_model_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no checkpoint folder at"):
        empty_model(tmp_path / "absent", dtype=torch.float32)
    with pytest.raises(StoreError, match="cannot be loaded"):
        empty_model(tmp_path, dtype=torch.float32)
