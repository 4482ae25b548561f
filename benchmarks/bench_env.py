"""`python -m benchmarks.bench_env [throughput|local|watching|qemu|all]`: the env server's speed as ratios with spread
over several rounds, against a named baseline, with the bottleneck of each figure."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.local import run_local
from benchmarks.processes import BenchmarkError
from benchmarks.qemu import run_qemu
from benchmarks.spread import show_machine
from benchmarks.throughput import run_throughput
from benchmarks.watching import run_watching
from osworld_pipeline.errors import PipelineError

LEVELS = (1, 8, 32, 64, 128)
BENCHES = ("throughput", "local", "watching", "qemu")


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    console = Console(width=max(170, Console().width))
    about = show_machine(console)
    results: list[dict[str, Any]] = []
    chosen = BENCHES if arguments.bench == "all" else (arguments.bench,)
    try:
        for bench in chosen:
            console.print()
            results += _run(bench, console, arguments)
    except (BenchmarkError, PipelineError) as error:
        print(f"bench-env: {error}", file=sys.stderr)
        return 1
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"machine": about, "results": results}, indent=1) + "\n")
    return 0


def _run(bench: str, console: Console, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    if bench == "throughput":
        return run_throughput(
            console,
            rounds=arguments.rounds,
            seconds=arguments.seconds,
            levels=arguments.episodes or LEVELS,
            peer=arguments.slime_checkout,
        )
    if bench == "local":
        return run_local(console, rounds=arguments.rounds, state_dir=arguments.state_dir)
    if bench == "watching":
        return run_watching(console, rounds=arguments.rounds, state_dir=arguments.state_dir)
    return run_qemu(console, rounds=arguments.rounds, state_dir=arguments.qemu_state_dir)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench-env", description=__doc__)
    parser.add_argument("bench", nargs="?", choices=(*BENCHES, "all"), default="all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="one window of the throughput (default 4)")
    parser.add_argument("--episodes", type=int, nargs="+", metavar="N", help=f"levels of the throughput {LEVELS}")
    parser.add_argument("--slime-checkout", type=Path, metavar="PATH", help="Slime-OSWorld, to measure against")
    parser.add_argument("--state-dir", type=Path, default=Path("var/desktops"), help="folder of the local image")
    parser.add_argument("--qemu-state-dir", type=Path, default=Path("var/desktops"), help="folder of qemu's image")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure to FILE")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
