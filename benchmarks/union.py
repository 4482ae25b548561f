"""The union build compared with Slime-OSWorld's script on the same generated input: wall time, peak memory, equal
artefacts, and lower bounds of the machine."""

import ast
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pyarrow.parquet as pq
from rich.console import Console

from benchmarks.processes import BenchmarkError, memory_mb, processes_below
from benchmarks.spread import Spread, print_table, verdict
from benchmarks.union_input import GeneratedInput, InputKind, generate_input
from osworld_pipeline.datasets.lines import read_blocks
from osworld_pipeline.datasets.sources import REPLAY_SOURCES

KINDS: tuple[InputKind, ...] = ("text", "images")
MIN_RATIO = {"text": 5.0, "images": 2.0}
"""Required ratio at the size JUDGED_BYTES."""
JUDGED_BYTES = 500_000_000
MAX_PEAK_MB = 600.0
SAMPLE_S = 0.1
"""Sampling the memory of all processes uses CPU time of a core that the build could use."""
RUN_TIMEOUT_S = 3_600.0
ARTEFACTS = ("osworld_tasks_all.parquet", "osworld_tasks_train.parquet")
_REFERENCE = Path(__file__).with_name("union_reference.py")
_BUILD_TABLES = """
import sys
from pathlib import Path
from osworld_pipeline.datasets.union.build import build_union_tables
from osworld_pipeline.domain.state import StateDir
build_union_tables(StateDir(Path(sys.argv[1])), system_prompt="You operate a computer.")
"""


@dataclass(frozen=True, kw_only=True)
class Measured:
    wall_s: float
    peak_mb: float
    """PSS of all its processes, MB of 10**6 bytes."""


def run_union(
    console: Console, *, sizes: Sequence[int], rounds: int, checkout: Path | None, folder: Path
) -> list[dict[str, Any]]:
    """Measure each size (bytes) of both kinds, reference and ours in turns. Without a checkout only ours.

    Raises:
        BenchmarkError: a build failed, or the artefacts differ.
    """
    results: list[dict[str, Any]] = []
    rows: list[Sequence[str]] = []
    for kind in KINDS:
        for size in sizes:
            made = generate_input(folder, kind=kind, num_bytes=size)
            found = _measure(made, rounds=rounds, checkout=checkout)
            limits = _limits(made)
            results += _figures(kind, size, found, limits)
            rows += _rows(kind, size, made, found, limits)
    title = f"union build, {rounds} rounds, {len(os.sched_getaffinity(0))} cores, reference and ours in turns"
    columns = ("input", "who", "wall, s", "MB/s", "peak, MB (PSS)", "ratio and bounds")
    print_table(console, title, columns, rows)
    return results


def _measure(made: GeneratedInput, *, rounds: int, checkout: Path | None) -> dict[str, list[Measured]]:
    found: dict[str, list[Measured]] = {"reference": [], "artefacts": [], "tables": []}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(prefix="bench-union-", dir=made.hf_root.parent) as name:
            root = Path(name)
            prompt = root / "prompt.txt"
            prompt.write_text("You operate a computer." if checkout is None else reference_prompt(checkout))
            if checkout is not None:
                options = _options(made.hf_root, made.osworld_repo, root / "theirs")
                found["reference"].append(_run([str(_REFERENCE), str(checkout), *options]))
            command = ["-m", "osworld_pipeline.cli", "union", "--system-prompt", str(prompt)]
            found["artefacts"].append(_run([*command, *_options(made.hf_root, made.osworld_repo, root / "ours")]))
            if checkout is not None:
                assert_equal_artefacts(root / "ours", root / "theirs")
            (root / "state").mkdir()
            (root / "state" / "datasets").symlink_to(made.hf_root.resolve())
            (root / "state" / "osworld").symlink_to(made.osworld_repo.resolve())
            found["tables"].append(_run(["-c", _BUILD_TABLES, str(root / "state")]))
    return found


def run_reference(checkout: Path, hf_root: Path, osworld_repo: Path, output_dir: Path) -> Measured:
    """Run Slime-OSWorld's script unchanged from the checkout. Raises BenchmarkError."""
    return _run([str(_REFERENCE), str(checkout), *_options(hf_root, osworld_repo, output_dir)])


def reference_prompt(checkout: Path) -> str:
    """The system prompt that its script writes, read from its source. Raises BenchmarkError."""
    path = checkout / "slime_osworld" / "env.py"
    try:
        tree = ast.parse(path.read_text())
    except OSError as error:
        raise BenchmarkError(f"{checkout} is not a checkout of Slime-OSWorld: {error.strerror} ({path})") from error
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == "OSWORLD_SYSTEM_PROMPT" for target in node.targets
        ):
            return str(ast.literal_eval(node.value))
    raise BenchmarkError(f"{path} assigns no OSWORLD_SYSTEM_PROMPT: is it another version of Slime-OSWorld?")


def assert_equal_artefacts(ours: Path, theirs: Path) -> None:
    """Compare value by value, streaming the rows. Raises BenchmarkError."""
    for name in ARTEFACTS:
        tables = [pq.read_table(folder / name) for folder in (ours, theirs)]
        if tables[0].column_names != tables[1].column_names or tables[0].to_pylist() != tables[1].to_pylist():
            raise BenchmarkError(f"{name} differs from the reference's ({ours}, {theirs})")
    stats = [json.loads((folder / "osworld_train_stats.json").read_text()) for folder in (ours, theirs)]
    if stats[0] != stats[1]:
        raise BenchmarkError(f"the statistics differ from the reference's: {stats}")
    with (
        (ours / "osworld_replay_train.jsonl").open("rb") as one,
        (theirs / "osworld_replay_train.jsonl").open("rb") as other,
    ):
        for number, (mine, its) in enumerate(_pairs(one, other), 1):
            if mine is None or its is None or json.loads(mine) != json.loads(its):
                raise BenchmarkError(f"line {number} of osworld_replay_train.jsonl differs from the reference's")


def _pairs(one: Iterable[bytes], other: Iterable[bytes]) -> Iterator[tuple[bytes | None, bytes | None]]:
    first, second = iter(one), iter(other)
    while True:
        pair = next(first, None), next(second, None)
        if pair == (None, None):
            return
        yield pair


def _options(hf_root: Path, osworld_repo: Path, output_dir: Path) -> list[str]:
    return ["--hf-root", str(hf_root), "--osworld-repo", str(osworld_repo), "--output-dir", str(output_dir)]


def _run(arguments: Sequence[str]) -> Measured:
    """Run a Python program to its end and sample the memory of its process tree."""
    start, peak = time.perf_counter(), 0.0
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, *arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            cwd=Path(__file__).resolve().parents[1], env=_environment(),
        )  # fmt: skip
        try:
            while process.poll() is None:
                if time.perf_counter() - start > RUN_TIMEOUT_S:
                    raise BenchmarkError(f"{' '.join(arguments[:4])} took longer than {RUN_TIMEOUT_S:g} s")
                peak = max(peak, memory_mb({process.pid, *processes_below(process.pid)})["pss"])
                time.sleep(SAMPLE_S)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        wall_s = time.perf_counter() - start
        if process.returncode:
            log.seek(0)
            raise BenchmarkError(f"{' '.join(arguments[:4])} failed:\n{log.read()[-1500:].decode(errors='replace')}")
    return Measured(wall_s=wall_s, peak_mb=peak)


def _environment() -> dict[str, str]:
    """The environment of a normal installation, with cached bytecode."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def _limits(made: GeneratedInput) -> dict[str, float]:
    """Lower bounds in seconds: reading the input and copying it to the disk, and parsing it with orjson."""
    files = [made.hf_root / source.path for source in REPLAY_SOURCES]

    def copy() -> None:
        for file in files:
            with tempfile.NamedTemporaryFile(dir=made.hf_root.parent) as target, file.open("rb") as source:
                shutil.copyfileobj(source, target, 2**22)
                target.flush()
                os.fsync(target.fileno())

    def parse() -> None:
        for file in files:
            for block in read_blocks(file):
                for line in block.read().splitlines():
                    orjson.loads(line)

    return {"read, write and sync, s": _seconds(copy), "one orjson pass on one core, s": _seconds(parse)}


def _seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _figures(kind: str, size: int, found: dict[str, list[Measured]], limits: dict[str, float]) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = []
    for who, runs in found.items():
        if runs:
            name = f"union build, {who}, {kind}, {size / 1e6:g} MB"
            wall = Spread.of(run.wall_s for run in runs)
            peak = Spread.of(run.peak_mb for run in runs)
            results.append({"bench": "union", "figure": f"{name}, wall", "unit": "s", **wall.fields()})
            results.append({"bench": "union", "figure": f"{name}, peak memory", "unit": "MB", **peak.fields()})
    for name, value in limits.items():
        figure = f"limit, {kind}, {size / 1e6:g} MB, {name.rpartition(',')[0]}"
        results.append({"bench": "union", "figure": figure, "unit": "s", **Spread.of([value]).fields()})
    return results


def _rows(
    kind: str, size: int, made: GeneratedInput, found: dict[str, list[Measured]], limits: dict[str, float]
) -> Iterator[Sequence[str]]:
    reference = found["reference"]
    for who, runs in found.items():
        if not runs:
            continue
        wall, peak = Spread.of(run.wall_s for run in runs), Spread.of(run.peak_mb for run in runs)
        note = ""
        if who != "reference":
            note = f"peak {MAX_PEAK_MB:g} MB: {verdict(peak.values[-1] <= MAX_PEAK_MB)}"
            if reference:
                ratio = Spread.of(theirs.wall_s / ours.wall_s for theirs, ours in zip(reference, runs, strict=True))
                note = f"{ratio.range_text()} times as fast; {note}"
                if size == JUDGED_BYTES and who == "artefacts":
                    note += f"; {MIN_RATIO[kind]:g} times: {verdict(ratio.median >= MIN_RATIO[kind])}"
        rate = made.num_bytes / 1e6 / wall.median
        label = f"{kind}, {made.num_bytes / 1e6:.0f} MB, {made.num_records} records"
        yield label, who, wall.range_text(), f"{rate:.0f}", peak.range_text(0), note
    yield (
        f"{kind}, {made.num_bytes / 1e6:.0f} MB",
        "limits",
        "",
        "",
        "",
        "; ".join(f"{name} {value:.1f}" for name, value in limits.items()),
    )
