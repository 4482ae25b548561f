"""`python -m benchmarks.bench_gpu [PART]... [--smoke] [--markdown FILE]`: the published 4B shape with random weights on
one GPU, each part in a separate process with a time limit, so that a failing part does not affect others."""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from benchmarks.gpu_report import markdown
from benchmarks.gpu_sheet import PartResult
from benchmarks.gpu_size import FULL, SMOKE, Size
from benchmarks.processes import BenchmarkError
from benchmarks.real_tokenizer import build_real_processor

LIMITS_S: Mapping[str, float] = {
    "exactness": 90, "lora": 75, "packing": 75, "speed": 90, "speed_lora": 75, "context": 90, "context_lora": 90,
    "sglang": 200,
}  # fmt: skip
"""Time limit of each part."""
BUDGET_S = 470.0
"""Time limit of all parts; a part that would begin later is not run."""
LEAST_S = 20.0
"""A part with less remaining time is not started."""
KILL_S = 20.0

Command = Callable[[str, Path], Sequence[str]]
"""The command that runs a part, given its name and the file of its result."""


def run_parts(
    names: Sequence[str],
    command: Command,
    *,
    limits_s: Mapping[str, float] = LIMITS_S,
    budget_s: float = BUDGET_S,
    on_done: Callable[[PartResult], None] = lambda _: None,
) -> list[PartResult]:
    """Run the parts one after the other; every part has a result, even if it fails."""
    deadline = time.monotonic() + budget_s
    results: list[PartResult] = []
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as folder:
        for name in names:
            left_s = deadline - time.monotonic()
            if left_s < min(LEAST_S, limits_s[name]):
                result = PartResult(
                    name=name, error=f"the {budget_s:.0f} s of all parts are used up; run this part alone"
                )
            else:
                result = _run_part(name, command, Path(folder), limit_s=min(limits_s[name], left_s))
            results.append(result)
            on_done(result)
    return results


def _run_part(name: str, command: Command, folder: Path, *, limit_s: float) -> PartResult:
    out, log = folder / f"{name}.json", folder / f"{name}.log"
    started = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command(name, out), stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        is_late = False
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            is_late = True
        finally:
            # The part and its child processes; the GPU's memory is free when they have ended.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(KILL_S)
    result = PartResult.read(out, name)
    result.seconds = round(time.monotonic() - started, 1)
    if is_late:
        result.status, result.error = "timed out", f"it took longer than its {limit_s:.0f} s"
    elif result.status in ("not run", "timed out") and not result.error:
        # The file has no final status: the part was killed from outside, or died before it began.
        last = log.read_text(errors="replace").strip().splitlines()[-1:] or ["no output"]
        result.status, result.error = "failed", f"ended with status {process.returncode}: {last[0]}"
    return result


def part_command(size: str, processor_folder: Path) -> Command:
    def command(name: str, out: Path) -> Sequence[str]:
        arguments = ["--size", size, "--processor", str(processor_folder), "--out", str(out)]
        return [sys.executable, "-m", "benchmarks.gpu_parts", name, *arguments]

    return command


def measure(names: Sequence[str], *, size: Size, on_done: Callable[[PartResult], None]) -> tuple[list[PartResult], str]:
    """All results, and the page. Raises BenchmarkError."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as place:
        folder = Path(place) / "processor"
        build_real_processor(folder)
        results = run_parts(
            names,
            part_command(size.name, folder),
            limits_s={name: size.limit_factor * limit_s for name, limit_s in LIMITS_S.items()},
            budget_s=size.limit_factor * BUDGET_S,
            on_done=on_done,
        )
    versions = ", ".join(f"{package} {version(package)}" for package in ("torch", "transformers"))
    page = markdown(
        results, size=size.name, versions=versions, seconds=time.monotonic() - started, day=datetime.now(UTC).date()
    )
    return results, page


def print_results(result: PartResult) -> None:
    reason = f": {result.error}" if result.error else ""
    print(f"{result.name}: {result.status} in {result.seconds:.0f} s{reason}", file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench-gpu", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"one of {', '.join(LIMITS_S)}; all by default")
    parser.add_argument("--smoke", action="store_true", help="a thin model with the real vocabulary, for any machine")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the page to FILE")
    arguments = parser.parse_args(argv)
    unknown = set(arguments.parts) - set(LIMITS_S)
    if unknown:
        parser.error(f"no part named {sorted(unknown)[0]}; there are: {', '.join(LIMITS_S)}")
    try:
        names = arguments.parts or list(LIMITS_S)
        results, page = measure(names, size=SMOKE if arguments.smoke else FULL, on_done=print_results)
    except BenchmarkError as error:
        print(f"bench-gpu: {error}", file=sys.stderr)
        return 1
    print(page)
    if arguments.markdown is not None:
        arguments.markdown.parent.mkdir(parents=True, exist_ok=True)
        arguments.markdown.write_text(page)
    return 0 if all(result.is_ok or result.status == "not run" for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
