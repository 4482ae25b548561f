"""`python -m benchmarks.bench_data [union|store|blobs|packs|growth|all]`: the union build compared with Slime-OSWorld's
script, and the store's writers, readers and images, as ratios with spread over several rounds, with the bottleneck of
each figure; the gain of packing images; and the cost of a growing state."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.blobs import run_blobs
from benchmarks.growth import run_growth
from benchmarks.packs import run_packs
from benchmarks.processes import BenchmarkError
from benchmarks.spread import show_machine
from benchmarks.store import run_store
from benchmarks.union import run_union
from osworld_pipeline.errors import PipelineError

BENCHES = ("union", "store", "blobs", "packs", "growth")
MEGABYTE = 10**6


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
        print(f"bench-data: {error}", file=sys.stderr)
        return 1
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"machine": about, "results": results}, indent=1) + "\n")
    return 0


def _run(bench: str, console: Console, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    if bench == "union":
        return run_union(
            console,
            sizes=[size * MEGABYTE for size in arguments.sizes],
            rounds=arguments.rounds,
            checkout=arguments.slime_checkout,
            folder=arguments.folder / "union",
        )
    if bench == "store":
        return run_store(
            console, rounds=arguments.rounds, folder=arguments.folder / "store", num_steps=arguments.num_steps
        )
    if bench == "growth":
        return run_growth(
            console, rounds=arguments.rounds, folder=arguments.folder / "growth", num_episodes=arguments.scale
        )
    if bench == "packs":
        return run_packs(
            console, rounds=arguments.rounds, folder=arguments.folder / "packs", num_blobs=arguments.num_blobs
        )
    return run_blobs(console, rounds=arguments.rounds, folder=arguments.folder / "blobs", num_blobs=arguments.num_blobs)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench-data", description=__doc__)
    parser.add_argument("bench", nargs="?", choices=(*BENCHES, "all"), default="all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sizes", type=int, nargs="+", metavar="MB", default=[100, 500, 2000])
    parser.add_argument("--num-steps", type=int, default=1_000_000, help="steps of the queried store")
    parser.add_argument("--num-blobs", type=int, default=1_000_000, help="images of the blob stores")
    parser.add_argument("--scale", type=int, default=100_000, help="episodes of the state that grows")
    parser.add_argument("--slime-checkout", type=Path, metavar="PATH", help="Slime-OSWorld, to measure against")
    parser.add_argument("--folder", type=Path, default=Path("var/bench-data"), help="folder of inputs and stores")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure to FILE")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
