"""Gain of packing cold images: a copy of a whole folder, garbage collection, listing and reading, before and after,
as ratios. Rows name three quarters of the images."""

import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console

from benchmarks.blobs import drop_caches, make_images
from benchmarks.spread import Spread, print_table
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.runs.upkeep.upkeep import collect_garbage, missing_blobs
from osworld_pipeline.store import BlobStore
from osworld_pipeline.store.packing import pack_cold_images

BATCH, NUM_READS, NUM_TOUCHED = 1_000, 2_000, 500
LAYOUTS = ("files", "packs")


def run_packs(console: Console, *, rounds: int, folder: Path, num_blobs: int) -> list[dict[str, Any]]:
    """`rounds` is how often each figure is measured; the images are written once."""
    state = StateDir(folder / "state")
    shutil.rmtree(folder, ignore_errors=True)
    try:
        names, num_bytes = _write(state, num_blobs)
        found = {"files": _measure(state, folder / "copy", names, rounds)}
        began = time.perf_counter()
        done = pack_cold_images(BlobStore(state.blobs), cold_s=-10, min_bytes=0)
        pack_s = time.perf_counter() - began
        assert done.num_images == num_blobs
        found["packs"] = _measure(state, folder / "copy", names, rounds)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    table = []
    for figure, unit in found["files"]:
        before, after = (Spread.of(found[layout][figure, unit]).median for layout in LAYOUTS)
        table.append((f"{figure}, {unit}", f"{before:,.4g}", f"{after:,.4g}", f"{before / after:,.1f} times"))
    title = (
        f"{num_blobs:,} images of 2 to 8 kB ({num_bytes / 1e6:,.0f} MB) in {done.num_packs} packs, packed at "
        f"{num_blobs / pack_s:,.0f} images/s; medians"
    )
    print_table(console, title, ("figure", *LAYOUTS, "packs take less"), table)
    return [
        {"bench": "packs", "layout": layout, "figure": figure, "unit": unit, **Spread.of(values).fields()}
        for layout in LAYOUTS
        for (figure, unit), values in found[layout].items()
    ]


def _write(state: StateDir, num_images: int) -> tuple[list[str], int]:
    """Write images without syncing each file, which would take most of the time."""
    names: list[str] = []
    num_bytes = 0
    for start in range(0, num_images, BATCH):
        for sha256, data in make_images(start, min(BATCH, num_images - start)):
            path = BlobStore(state.blobs).path(sha256, suffix="png")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            names.append(sha256)
            num_bytes += len(data)
    state.tables.mkdir(parents=True)
    table = pa.table({"images": [[sha256] for sha256 in names[: num_images * 3 // 4]]})
    pq.write_table(table, state.tables / "replay_buffer.parquet")
    return names, num_bytes


def _measure(state: StateDir, copy: Path, names: list[str], rounds: int) -> dict[tuple[str, str], list[float]]:
    blobs = BlobStore(state.blobs)
    chosen = names[:: max(1, len(names) // NUM_READS)]
    absent = [sha256 for sha256, _ in make_images(len(names), NUM_TOUCHED)]

    def copy_all() -> None:
        subprocess.run(["cp", "-a", state.root, copy], check=True)
        subprocess.run(["sync", "-f", copy], check=True)
        shutil.rmtree(copy)

    def read_all() -> None:
        for sha256 in chosen:
            blobs.read(sha256)

    def look_for() -> None:
        for sha256 in absent:
            assert not blobs.path(sha256, suffix="png").is_file()
            assert blobs.packs.find(sha256) is None

    figures: dict[tuple[str, str], tuple[Callable[[], object], int, bool]] = {
        ("copy of the folder, cold where that is allowed", "s"): (copy_all, 1, True),
        ("garbage collection (dry run), cold where that is allowed", "s"): (
            lambda: collect_garbage(state, grace_s=-10, is_dry_run=True), 1, True,
        ),
        ("check that no image is missing", "s"): (lambda: missing_blobs(state), 1, False),
        ("read at random, warm", "ms"): (read_all, len(chosen), False),
        ("look for one that is not there", "ms"): (look_for, len(absent), False),
    }  # fmt: skip
    found: dict[tuple[str, str], list[float]] = {}
    for (figure, unit), (act, number, is_cold) in figures.items():
        for _ in range(rounds):
            if is_cold:
                drop_caches()
            began = time.perf_counter()
            act()
            scale = 1e3 if unit == "ms" else 1.0
            found.setdefault((figure, unit), []).append((time.perf_counter() - began) * scale / number)
    return found
