"""Merging an adapter for other programs: the sum is taken in float32, and the share lost to rounding is reported."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from adapter_samples import adapted_recipe, fine_tuned
from safetensors.torch import load_file, save_file
from train_on_ranks import demonstrations
from training_samples import saved_weights

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import StoreError
from osworld_pipeline.runs.checkpoints.merged_export import export_merged
from osworld_pipeline.training.model import load_model
from osworld_pipeline.training.objective.score import score_trajectories

"""Typer uses, while it is imported, what a later click will not have."""

SCALE = 8.0 / 4


def call(*arguments: str) -> None:
    from osworld_pipeline.cli import app

    app(["export", "merged", *arguments], standalone_mode=False)


@pytest.fixture(scope="module")
def bf16_base(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = shutil.copytree(tiny_folder, tmp_path_factory.mktemp("bf16") / "base")
    weights = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def checkpoint(bf16_base: Path, tmp_path: Path) -> Path:
    recipe = adapted_recipe(dtype="bfloat16")
    recipe = recipe.model_copy(update={"sft": recipe.sft.model_copy(update={"learning_rate": 1e-4})})
    return fine_tuned(bf16_base, recipe, StateDir(tmp_path / "var"))


def independent_error(base: Path, checkpoint: Path, merged: Path) -> float:
    """The error computed from the files by numpy, layer by layer."""
    before, after = (load_file(folder / "model.safetensors") for folder in (base, merged))
    factors = saved_weights(checkpoint)
    lost = learned = 0.0
    for name in (name for name in factors if ".lora_A." in name):
        layer = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        a, b = (factors[one].double().numpy() for one in (name, name.replace("lora_A", "lora_B")))
        delta = SCALE * (b @ a)
        old, new = (weights[f"{layer}.weight"].double().numpy() for weights in (before, after))
        lost += float((((new - old) - delta) ** 2).sum())
        learned += float((delta**2).sum())
    return (lost / learned) ** 0.5


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_reported_error_equals_that_of_an_independent_computation(
    bf16_base: Path, checkpoint: Path, tmp_path: Path, dtype: str, processor, capsys: pytest.CaptureFixture[str]
):
    output = tmp_path / "merged"
    call(str(checkpoint), str(output), "--dtype", dtype, "--json")
    error = json.loads(capsys.readouterr().out)["rounding_error"]
    assert error == pytest.approx(independent_error(bf16_base, checkpoint, output), rel=1e-9)
    assert error > 0.3 if dtype == "bfloat16" else error < 1e-3, "steps this small are nearly lost in bfloat16 alone"
    weights = load_file(output / "model.safetensors")
    assert {str(tensor.dtype) for tensor in weights.values()} == {f"torch.{dtype}"}
    assert weights.keys() == load_file(bf16_base / "model.safetensors").keys()
    assert json.loads((output / "config.json").read_text())["dtype"] == dtype
    assert not (output / "adapter").exists()
    scored = score_trajectories(load_model(output), processor, demonstrations(processor, 3))
    exact = score_trajectories(load_model(checkpoint), processor, demonstrations(processor, 3))
    if dtype == "float32":
        assert all(torch.allclose(one, other, atol=1e-4) for one, other in zip(scored, exact, strict=True))


@pytest.mark.parametrize(("dtype", "is_warned"), [("bfloat16", True), ("float32", False)])
def test_a_large_error_comes_with_a_warning(
    checkpoint: Path, tmp_path: Path, dtype: str, is_warned: bool, capsys: pytest.CaptureFixture[str]
):
    call(str(checkpoint), str(tmp_path / "merged"), "--dtype", dtype)
    reported = capsys.readouterr().out
    assert "14 layers merged in " + dtype in reported
    assert (
        "Warning: rounding makes the merged model differ from the trained one." in " ".join(reported.split())
    ) is is_warned


def test_a_base_of_several_files_is_merged_into_several_files(bf16_base: Path, tmp_path: Path, processor):
    base = tmp_path / "base"
    load_model(bf16_base, dtype="bfloat16").save_pretrained(base, max_shard_size="100KB")
    for path in bf16_base.glob("*.json*"):
        if not (base / path.name).exists():
            shutil.copyfile(path, base / path.name)
    for path in bf16_base.glob("*.jinja"):
        shutil.copyfile(path, base / path.name)
    folder = fine_tuned(base, adapted_recipe(dtype="bfloat16"), StateDir(tmp_path / "var"), num_updates=1)
    export_merged(StateDir(tmp_path), str(folder), tmp_path / "merged", dtype="float32", replace=False)
    shards = [path.name for path in sorted(base.glob("model-*.safetensors"))]
    assert len(shards) > 1
    assert [path.name for path in sorted((tmp_path / "merged").glob("*.safetensors"))] == shards
    scored, exact = (
        score_trajectories(load_model(one), processor, demonstrations(processor, 3))
        for one in (tmp_path / "merged", folder)
    )
    assert all(torch.allclose(one, other, atol=1e-4) for one, other in zip(scored, exact, strict=True))


def test_merging_a_checkpoint_of_whole_weights_is_refused(bf16_base: Path, tmp_path: Path):
    with pytest.raises(StoreError, match=r"base has no adapter to merge: it holds whole weights"):
        export_merged(StateDir(tmp_path), str(bf16_base), tmp_path / "merged", dtype="float32", replace=False)
    assert not (tmp_path / "merged").exists()


def test_an_existing_export_is_replaced_only_on_request(checkpoint: Path, tmp_path: Path):
    state, output = StateDir(tmp_path), tmp_path / "merged"
    export_merged(state, str(checkpoint), output, dtype="float32", replace=False)
    with pytest.raises(StoreError, match="merged"):
        export_merged(state, str(checkpoint), output, dtype="bfloat16", replace=False)
    export_merged(state, str(checkpoint), output, dtype="bfloat16", replace=True)
    assert json.loads((output / "export.json").read_text())["dtype"] == "bfloat16"
