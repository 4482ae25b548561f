"""What a recipe needs is printed item by item, for the named GPU or for the GPU of this machine."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from osworld_pipeline.doctor.recipe_fit import judge_recipe, lack_of_gpus, present_gpu_bytes, show_fit
from osworld_pipeline.errors import RecipeError
from osworld_pipeline.recipes import load_recipe


def test_the_table_has_a_row_for_each_item_and_ends_with_the_verdict_and_the_remedies() -> None:
    recipe = load_recipe("areal_full", settings=["trainer.num_processes=1"])
    console = Console(record=True, width=160)
    show_fit(judge_recipe(recipe, gpu_gb=80), console)
    text = console.export_text()
    for name in (
        "weights",
        "master weights",
        "optimiser moments",
        "activations",
        "logits",
        "engine's weights",
        "total",
    ):
        assert f"\n{name}" in text
    assert "does not fit 80.0 GB" in text
    assert "→ trainer.num_processes=" in text


def test_the_gpu_memory_of_this_machine_is_read_from_nvidia_smi(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 81559\necho 24564\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert present_gpu_bytes() == 24_564 << 20
    assert judge_recipe(load_recipe("qwen3vl_4b"), gpu_gb=None).gpu_bytes == 24_564 << 20


def test_without_a_gpu_in_this_machine_no_recipe_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert judge_recipe(load_recipe("areal_full"), gpu_gb=None).is_ok


def test_a_model_of_unknown_size_is_one_clear_error() -> None:
    recipe = load_recipe("qwen3vl_4b", settings=['model.path="somebody/else"'])
    with pytest.raises(RecipeError, match="the size of somebody/else is not known here"):
        judge_recipe(recipe, gpu_gb=80)


def doctor(tmp_path: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return pipeline(tmp_path, "doctor", *arguments)


def pipeline(tmp_path: Path, command: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    words = [sys.executable, "-m", "osworld_pipeline.cli", command, "--state", str(tmp_path), *arguments]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)


def test_the_command_refuses_what_does_not_fit(tmp_path: Path) -> None:
    settings = ["--set", "trainer.num_processes=1", "--gpu-memory", "80"]
    done = doctor(tmp_path, "--role", "trainer", "--recipe", "areal_full", "--json", *settings)
    answer = json.loads(done.stdout)
    assert done.returncode == 1
    assert not answer["fit"]["ok"]
    assert answer["fit"]["remedies"]


def test_the_first_line_names_the_recipe_for_which_the_trainer_is_judged(tmp_path: Path) -> None:
    first, *rest = doctor(tmp_path, "--role", "trainer").stdout.splitlines()
    assert first.startswith("readiness for the recipe demo, the default; --recipe selects another of areal_full, ")
    assert any("demo needs" in line for line in rest)


def test_a_machine_without_gpus_is_refused_by_name_for_a_recipe_that_needs_eight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_gpu = tmp_path / "programs"
    without_gpu.mkdir()
    monkeypatch.setenv("PATH", f"{without_gpu}:{Path(sys.executable).parent}")
    words = ["--recipe", "qwen3vl_4b", "--set", "trainer.num_processes=8"]
    reported = "qwen3vl_4b trains on 8 GPUs, and this machine has none"
    found = doctor(tmp_path, "--role", "trainer", *words)
    planned = pipeline(tmp_path, "train", "--dry-run", *words)
    for done in (found, planned):
        assert (done.returncode, reported in done.stdout) == (1, True), done.stdout + done.stderr
    answer = json.loads(doctor(tmp_path, "--role", "trainer", "--json", *words).stdout)
    assert (answer["ok"], answer["recipe"], answer["lacks"].startswith(reported)) == (False, "qwen3vl_4b", True)


def test_launched_servers_need_gpus_in_addition_to_those_of_the_trainer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    reported = lack_of_gpus(load_recipe("qwen3vl_4b_node"))
    assert reported.startswith("qwen3vl_4b_node trains on 4 GPUs and samples on 4 more, and this machine has none")


def test_the_doctor_prints_the_same_plan_as_train(tmp_path: Path) -> None:
    words = ["--recipe", "smoke", "--dry-run"]
    planned = pipeline(tmp_path, "train", *words)
    found = doctor(tmp_path, "--role", "trainer", *words)
    assert planned.returncode == 0, planned.stderr
    assert planned.stdout.strip()
    reported, _, command = found.stdout.rpartition("next: ")
    assert reported.endswith(planned.stdout)
    assert "osworld-pipeline train --recipe smoke" in command


@pytest.mark.parametrize("option", [("--gpu-memory", "80"), ("--dry-run",), ("--set", "sft.num_updates=1")])
def test_options_of_a_recipe_are_refused_without_the_trainer_role(tmp_path: Path, option: tuple[str, ...]) -> None:
    done = doctor(tmp_path, *option)
    assert (done.returncode, option[0] in done.stderr) == (2, True)


def test_a_recipe_is_accepted_only_for_the_trainer_role(tmp_path: Path) -> None:
    assert doctor(tmp_path, "--role", "mlflow", "--recipe", "demo").returncode == 2
