"""`python -m benchmarks.bench_rollout [loops|turns|requests|engine|episode|all]`: how busy environments are compared
with a batch-synchronous loop, the overhead of a turn in addition to desktop and model, the HTTP client's CPU with many
requests at a time, the transformers engine, and the parts of an episode's time on real desktops; several rounds each,
with spread."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.engine import run_engine
from benchmarks.episode_parts import run_episode_parts
from benchmarks.rollout_loops import run_loops
from benchmarks.rollout_requests import run_requests
from benchmarks.rollout_turns import run_turns
from benchmarks.spread import show_machine
from osworld_pipeline.errors import PipelineError

BENCHES = {
    "loops": run_loops,
    "turns": run_turns,
    "requests": run_requests,
    "engine": run_engine,
    "episode": run_episode_parts,
}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    console = Console(width=max(150, Console().width))
    about = show_machine(console)
    results: list[dict[str, Any]] = []
    chosen = list(BENCHES) if arguments.bench == "all" else [arguments.bench]
    try:
        for bench in chosen:
            console.print()
            results += BENCHES[bench](console, rounds=arguments.rounds) or []
    except PipelineError as error:
        print(f"bench-rollout: {error}", file=sys.stderr)
        return 1
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"machine": about, "results": results}, indent=1) + "\n")
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench-rollout", description=__doc__)
    parser.add_argument("bench", nargs="?", choices=(*BENCHES, "all"), default="all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure to FILE")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
