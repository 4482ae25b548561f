"""`python -m benchmarks.bench_training`: updates per second of our trainer against TRL's, as a ratio with spread and
with what limits it. The published 4B shape on a GPU is measured by `make test-gpu`."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from transformers.utils import logging as transformers_logging

from benchmarks.processes import BenchmarkError
from benchmarks.spread import machine
from benchmarks.training_trainers import run_trainers
from osworld_pipeline.errors import PipelineError


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    console = Console(width=max(150, Console().width))
    about = machine()
    transformers_logging.disable_progress_bar()
    console.print("  ".join(f"{name}: {value}" for name, value in about.items()))
    console.print()
    try:
        results = run_trainers(console, rounds=arguments.rounds, num_updates=arguments.updates)
    except (BenchmarkError, PipelineError) as error:
        print(f"bench-training: {error}", file=sys.stderr)
        return 1
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"machine": about, "results": results}, indent=1) + "\n")
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench-training", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="of each trainer, in turns")
    parser.add_argument("--updates", type=int, default=3, help="timed in a round, after one to warm up")
    parser.add_argument("--json", type=Path, metavar="FILE", help="gets every figure")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
