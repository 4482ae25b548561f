"""The union build holds a few blocks at a time, however large its sources are."""

import base64
import tracemalloc
from collections.abc import Callable
from pathlib import Path

from raw_samples import put_lines, put_task, record

from osworld_pipeline.datasets.union.build import build_union_tables
from osworld_pipeline.domain.state import StateDir


def peak_of_build(state: StateDir, image: str, *, num_records: int) -> int:
    """Peak memory in bytes of a build from a source with that many records of more than a MB each."""
    put_task(state, {"id": "t1", "instruction": "x", "evaluator": {"func": "f"}})
    lines = [record(f"t{index}", images=[image, image], note=str(index)) for index in range(num_records)]
    size = put_lines(state, "sft_clean", lines).locate(state).stat().st_size
    assert size > num_records * 2**20
    del lines
    progress: list[tuple[str, int, int]] = []
    tracemalloc.start()
    try:
        summary = build_union_tables(
            state, system_prompt="p", num_workers=0, on_progress=lambda *reported: progress.append(reported)
        )
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert summary.num_rows["replay_buffer"] == num_records
    assert progress[-1] == ("sft_clean", size, size), "each byte of it once"
    assert len(list(state.blobs.rglob("*.png"))) == 1, "the image lies in the store, once"
    return peak


def test_memory_of_a_build_does_not_grow_with_its_sources(
    tmp_path: Path, noise_png: Callable[[int, int, int], bytes]
) -> None:
    image = base64.b64encode(noise_png(384, 384, 0)).decode()
    # The first build of a process imports what builds need.
    _, small, large = (peak_of_build(StateDir(tmp_path / str(count)), image, num_records=count) for count in (1, 8, 48))
    assert large < 1.2 * small
    assert large < 48 * 2**20, "what is held is less than what was read"
