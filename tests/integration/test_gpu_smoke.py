"""The GPU measurement at its smoke size, on any machine: every part runs, and its claims hold."""

from pathlib import Path

import pytest
from real_processor import real_processor

from benchmarks.bench_gpu import measure, print_results
from benchmarks.gpu_parts import PARTS, run_part
from benchmarks.gpu_sheet import PartResult, Sheet
from benchmarks.gpu_size import SMOKE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

EXPECTED = {
    "exactness": "|trainer - sampler| of a log-probability, after 1 updates",
    "lora": "sequences clipped in the first on-policy update",
    "packing": "|packed - padded| of a log-probability",
    "speed": "sft: 2 sequences of 1,024 tokens, 6 screens",
    "speed_lora": "gspo, lora: peak memory of torch, and the estimate",
    "context": "longest sequence that fits",
    "context_lora": "longest sequence that fits",
}
"""A figure of each part."""


@pytest.fixture(scope="module")
def processor_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpu") / "processor"
    real_processor(folder)
    return folder


@pytest.mark.parametrize("name", EXPECTED)
def test_a_part_runs_at_the_smoke_size_and_its_claims_hold(name: str, processor_folder: Path, tmp_path: Path) -> None:
    run_part(name, SMOKE, processor_folder, Sheet(name, file=tmp_path / "out.json"))
    result = PartResult.read(tmp_path / "out.json", name)
    assert (result.status, result.error) == ("ok", "")
    assert [claim.sentence for claim in result.claims if not claim.is_met] == []
    assert EXPECTED[name] in [figure.name for figure in result.figures]


def test_every_part_of_the_measurement_is_tested_here() -> None:
    assert {*EXPECTED, "sglang"} == set(PARTS)


def test_without_sglang_its_part_is_reported_as_not_run_and_the_page_is_still_written(
    processor_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs the part in a process, as on a GPU."""
    monkeypatch.delenv("OSWORLD_SGLANG_PYTHON", raising=False)
    (result,), page = measure(["sglang"], size=SMOKE, on_done=print_results)
    assert result.status == "not run"
    assert "OSWORLD_SGLANG_PYTHON" in result.error
    assert "| An sglang server | not run |" in page
