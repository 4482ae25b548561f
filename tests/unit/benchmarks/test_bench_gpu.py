"""The GPU measurement's frame: a part that fails, hangs or dies keeps its figures and does not affect other parts."""

import sys
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest

from benchmarks.bench_gpu import LIMITS_S, run_parts
from benchmarks.gpu_parts import PARTS, longest_fitting, run_part
from benchmarks.gpu_report import TITLES, markdown
from benchmarks.gpu_sheet import Claim, Figure, NotMeasured, PartResult, Sheet
from benchmarks.gpu_size import FULL, SMOKE, estimated_bytes, fitted, peak_tflops
from benchmarks.real_shape import Architecture
from osworld_pipeline.domain.trajectory import Trajectory

GB = 10**9
PROGRAM = """
import os, sys, time
from pathlib import Path
from benchmarks.gpu_sheet import Sheet
name, out = sys.argv[1], Path(sys.argv[2])
sheet = Sheet(name, file=out)
sheet.result.status = "timed out"
sheet.figure("found", "1")
if name == "hangs":
    time.sleep(60)
if name == "dies":
    print("out of luck", flush=True)
    os._exit(7)
sheet.result.status = "ok"
sheet.write()
"""
"""Stands for a part in its process."""
HAND = Architecture(
    vocab_size=512, hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=32,
    mrope_section=(8, 4, 4), max_positions=1000, vision_depth=1, vision_hidden_size=16, vision_intermediate_size=32,
    vision_heads=2, deepstack_layers=(0,),
)  # fmt: skip


def fake_command(name: str, out: Path) -> list[str]:
    return [sys.executable, "-c", PROGRAM, name, str(out)]


def test_a_part_that_hangs_or_dies_keeps_its_figures_and_the_others_run() -> None:
    names = ["dies", "hangs", "works"]
    results = run_parts(names, fake_command, limits_s={"dies": 60, "hangs": 4, "works": 60}, budget_s=200)
    dies, hangs, works = results
    assert [result.name for result in results] == names
    assert (dies.status, dies.error) == ("failed", "ended with status 7: out of luck")
    assert (hangs.status, hangs.error) == ("timed out", "it took longer than its 4 s")
    assert (works.status, works.is_ok) == ("ok", True)
    assert [result.figures for result in results] == [[Figure(name="found", value="1")]] * 3


def test_a_part_that_would_start_after_the_budget_is_not_run() -> None:
    (result,) = run_parts(["works"], fake_command, limits_s={"works": 60}, budget_s=1)
    assert result.status == "not run"
    assert "used up" in result.error


def test_an_exception_ends_only_its_part_and_is_noted_on_the_sheet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(size: object, folder: object, sheet: Sheet) -> None:
        sheet.figure("before", "1")
        raise RuntimeError("CUDA error: something\nand more")

    def lacks(size: object, folder: object, sheet: Sheet) -> None:
        raise NotMeasured("nothing is installed")

    monkeypatch.setitem(PARTS, "fails", fails)
    monkeypatch.setitem(PARTS, "lacks", lacks)
    found = {}
    for name in ("fails", "lacks"):
        run_part(name, SMOKE, tmp_path, Sheet(name, file=tmp_path / name))
        found[name] = PartResult.read(tmp_path / name, name)
    assert (found["fails"].status, found["fails"].error) == ("failed", "RuntimeError: CUDA error: something")
    assert found["fails"].figures == [Figure(name="before", value="1")]
    assert (found["lacks"].status, found["lacks"].error) == ("not run", "nothing is installed")


def test_every_part_has_a_limit_and_a_title() -> None:
    assert set(PARTS) == set(LIMITS_S) == set(TITLES)


def test_the_page_lists_claims_that_are_not_met_and_escapes_bars() -> None:
    met = PartResult(name="lora", status="ok", seconds=3, device="NVIDIA H100 80GB HBM3")
    met.figures.append(Figure(name="|a - b|", value="0.1"))
    broken = PartResult(name="speed", status="ok", claims=[Claim(sentence="it is fast", is_met=False)])
    page = markdown([met, broken], size="full", versions="torch 2", seconds=10, day=date(2026, 1, 2))
    assert page.startswith(
        "# Measured on NVIDIA H100 80GB HBM3\n\n2026-01-02, size `full`, 10 s, torch 2. 1 of 2 parts"
    )
    assert "| \\|a - b\\| | 0.1 |" in page
    assert "| Speed and memory: all weights | a check failed |" in page
    assert "- **not met**: it is fast" in page


@pytest.mark.parametrize(
    ("true_limit", "expected"), [(10_000, (1000, False)), (700, (687, True)), (100, (100, True)), (0, (0, True))]
)
def test_the_longest_context_is_found_to_within_a_step(true_limit: int, expected: tuple[int, bool]) -> None:
    found = longest_fitting(lambda num: num <= true_limit, first=500, limit=1000, step=20, budget_s=60)
    assert found[1] == expected[1]
    assert true_limit - 20 <= found[0] <= true_limit or found == expected


def test_a_search_whose_time_is_spent_claims_no_bound() -> None:
    assert longest_fitting(lambda num: True, first=500, limit=1000, step=20, budget_s=-1) == (0, False)


def test_an_80_gb_device_trains_fewer_than_all_layers_and_a_larger_one_all() -> None:
    assert 24 <= fitted(FULL, "gspo", context=8192, num_bytes=85 * GB).architecture.num_layers < 36
    assert fitted(FULL, "gspo", context=8192, num_bytes=150 * GB).architecture.num_layers == 36
    assert fitted(FULL, "gspo_lora", context=8192, num_bytes=85 * GB).architecture.num_layers == 36
    assert fitted(FULL, "gspo", context=8192, num_bytes=None) == FULL


def test_the_memory_estimate_depends_on_the_number_of_layers() -> None:
    smaller = replace(FULL, architecture=replace(FULL.architecture, num_layers=18))
    layers = 18 * FULL.architecture.layer_weights
    # Weights, gradients, masters with their gradients and two moments: 20 bytes each, and 5% on top; activations
    # are 2% more.
    difference = estimated_bytes(FULL, "gspo", context=8192) - estimated_bytes(smaller, "gspo", context=8192)
    assert difference == pytest.approx(1.05 * 20 * layers, rel=0.03)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4), ("NVIDIA H100 PCIe", 756.5), ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4), ("NVIDIA A100-SXM4-80GB", 312.0), ("NVIDIA L4", 121.0), ("NVIDIA L40S", 362.0),
        ("CPU", None),
    ],
)  # fmt: skip
def test_the_peak_tflops_are_those_of_the_named_device(name: str, expected: float | None) -> None:
    assert peak_tflops(name) == expected


def test_the_published_shape_has_four_billion_weights() -> None:
    assert Architecture().trained_weights == pytest.approx(4.02e9, rel=0.01)


def test_model_flop_of_an_update_match_a_calculation_by_hand() -> None:
    # A layer's weights: q and o 2 * 32 * 64, k and v 2 * 32 * 32, MLP 3 * 32 * 64: 12,288. Ten tokens, two operations
    # each: 245,760. Attention 2 * 64 * 10^2 = 12,800; two responses' logits 2 * 32 * 512 * 2 = 65,536.
    text = 245_760 + 12_800 + 65_536
    # A patch in the tower: 4 * 16^2 + 2 * 16 * 32 = 2,048; eight of them, two operations each: 32,768. Attention of all
    # to all 4 * 16 * 8^2 = 4,096. Two mergers of 64 * 64 + 64 * 32 = 6,144 on two tokens: 2 * 2 * 6,144 * 2 = 49,152.
    vision = 32_768 + 4_096 + 49_152
    trajectory = Trajectory(
        trajectory_id="a", task_id="t", token_ids=(1,) * 10, response_mask=(0,) * 8 + (1, 1), images=()
    )
    found = {kind: HAND.update_flops(kind, [trajectory], [8]) for kind in ("sft", "gspo", "sft_lora", "gspo_lora")}
    assert found == {
        "sft": 3 * text + vision,
        "gspo": 4 * text + 2 * vision,
        "sft_lora": 2 * text + vision,
        "gspo_lora": 3 * text + 2 * vision,
    }
