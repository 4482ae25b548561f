"""The published 4B shape on a CUDA GPU. All parts run once, each in a process of its own; the page that they make is
printed and written to var/gpu.md."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_processor import require_ranks

from benchmarks.bench_gpu import LIMITS_S, measure, print_results
from benchmarks.gpu_sheet import PartResult
from benchmarks.gpu_size import FULL

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(900)]
PAGE = Path(__file__).resolve().parents[2] / "var" / "gpu.md"


@pytest.fixture(scope="module")
def results() -> Iterator[dict[str, PartResult]]:
    require_ranks()
    found, page = measure(list(LIMITS_S), size=FULL, on_done=print_results)
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page)
    yield {result.name: result for result in found}
    print(f"\n{page}\nWritten to {PAGE}", file=sys.stderr)


@pytest.mark.parametrize("name", LIMITS_S)
def test_each_part_of_the_measurement_succeeds(name: str, results: dict[str, PartResult]) -> None:
    result = results[name]
    if result.status == "not run":
        pytest.skip(result.error)
    assert result.status == "ok", result.error
    assert [claim.sentence for claim in result.claims if not claim.is_met] == []
