"""`python -m benchmarks.bench_training [exactness|importance|trainers|all]`: the share of sequences that rounding clips
in the first on-policy update, the effect of each importance form on stale samples, and updates per second of our
trainer against TRL's, as a ratio with spread. `make test-gpu` measures the published 4B shape on a GPU."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers.utils import logging as transformers_logging

from benchmarks.importance_forms import run_forms
from benchmarks.processes import BenchmarkError
from benchmarks.spread import show_machine
from benchmarks.training_exactness import run_exactness
from benchmarks.training_trainers import run_trainers
from osworld_pipeline.errors import PipelineError

BENCHES = ("exactness", "importance", "trainers")


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    console = Console(width=max(150, Console().width))
    about = show_machine(console)
    transformers_logging.disable_progress_bar()
    chosen = BENCHES if arguments.bench == "all" else (arguments.bench,)
    results: list[dict[str, Any]] = []
    try:
        if "exactness" in chosen:
            results += run_exactness(console)
        if "importance" in chosen:
            results += run_forms(console)
        if "trainers" in chosen:
            results += run_trainers(console, rounds=arguments.rounds, num_updates=arguments.updates)
    except (BenchmarkError, PipelineError) as error:
        print(f"bench-training: {error}", file=sys.stderr)
        return 1
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"machine": about, "results": results}, indent=1) + "\n")
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench-training", description=__doc__)
    parser.add_argument("bench", nargs="?", choices=(*BENCHES, "all"), default="all")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each trainer, in turns")
    parser.add_argument("--updates", type=int, default=3, help="timed updates in a round, after a warm-up")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure to FILE")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
