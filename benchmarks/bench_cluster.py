"""`python -m benchmarks.bench_cluster [--episodes N] [--desktops N] [--nodes N]`: the episodes of an evaluation on Ray
actors over several nodes of this machine, and the share of time in which desktops are busy. Desktops and engine are
stubs that wait; actors, the program that directs them and the store are those of an evaluation."""

import argparse
import asyncio
import json
import os
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from benchmarks.processes import BenchmarkError
from benchmarks.ray_nodes import ray_nodes
from benchmarks.rollout_stub import STUB_SAMPLING, Latencies, StubEpisodes, stub_tasks
from benchmarks.spread import print_table, show_machine, verdict
from osworld_pipeline.domain.episode import Episode, EpisodePurpose
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.domain.task import Task
from osworld_pipeline.errors import PipelineError
from osworld_pipeline.recipes import load_recipe
from osworld_pipeline.rollout.run_episode import EpisodePlan
from osworld_pipeline.runs.evaluate.evaluate import run_and_store
from osworld_pipeline.runs.placement import RayResources, RayShare
from osworld_pipeline.runs.rollouts.ray_actor import Weights
from osworld_pipeline.runs.rollouts.ray_pool import open_pool
from osworld_pipeline.runs.rollouts.ray_rollouts import RayRollouts
from osworld_pipeline.runs.rollouts.session import episode_settings
from osworld_pipeline.store import TrajectoryStore

BUSY_BAR = 0.9
NUM_TASKS = 369


class StubSession:
    """The session of an actor."""

    def __init__(self, latencies: Latencies) -> None:
        self._run_one = StubEpisodes(latencies)

    async def run_episode(self, task: Task, plan: EpisodePlan) -> Episode:
        return await self._run_one(task, plan)


@asynccontextmanager
async def open_stub(latencies: Latencies, weights: Weights, client_id: str) -> AsyncIterator[Any]:
    yield StubSession(latencies)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    console = Console(width=max(150, Console().width))
    about = show_machine(console)
    latencies = Latencies(scale=arguments.scale)
    nodes = [{"CPU": 1.0, "desktop": 1.0}] * arguments.nodes
    try:
        with ray_nodes(nodes, os.environ) as ray, tempfile.TemporaryDirectory() as folder:
            os.environ.update(ray.variables)
            figures = asyncio.run(_measure(ray.address, StateDir(Path(folder)), latencies, arguments, console))
    except (BenchmarkError, PipelineError) as error:
        print(f"bench-cluster: {error}", file=sys.stderr)
        return 1
    _print(console, figures, latencies)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"machine": about, "results": [figures]}, indent=1) + "\n")
    return 0 if figures["busy_share"] >= BUSY_BAR else 1


async def _measure(
    address: str, state: StateDir, latencies: Latencies, arguments: argparse.Namespace, console: Console
) -> dict[str, Any]:
    import ray

    ray.init(address=address, log_to_driver=False)
    share = RayShare(num_rollout_actors=arguments.nodes, rollout_actor=RayResources(cpus=1, custom={"desktop": 1}))
    open_with = partial(open_stub, latencies)
    store, planned = TrajectoryStore(state), _plans(arguments.episodes)
    planned_s, outcomes = 0.0, Counter[str]()
    with Progress(console=console) as bar:
        row = bar.add_task("episodes", total=len(planned))

        def on_episode(episode: Episode) -> None:
            nonlocal planned_s
            planned_s += episode.times_s.get("planned", 0.0)
            outcomes[str(episode.outcome)] += 1
            bar.advance(row)

        async with open_pool(partial(open_with, Weights(folder=None)), share, purpose="bench") as pool:
            settings = episode_settings(load_recipe("smoke"), max_turns=30)
            rollouts = RayRollouts(pool, open_with, settings=settings, engine_name="stub")
            started = time.monotonic()
            await run_and_store(planned, rollouts, store, on_episode, num_slots=arguments.desktops)
            wall_s = time.monotonic() - started
            num_lost = rollouts.num_lost
    stored = len(store.read_parts([plan.episode_id for _, plan in planned[:: max(1, len(planned) // 1000)]]))
    ray.shutdown()
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "bench": "cluster",
        "nodes": arguments.nodes,
        "desktops": arguments.desktops,
        "episodes": sum(outcomes.values()),
        "faults": outcomes.total() - outcomes["success"] - outcomes["failure"],
        "lost_actors": num_lost,
        "sampled_parts_found": stored,
        "wall_s": round(wall_s, 1),
        "episodes_per_s": round(sum(outcomes.values()) / wall_s, 1),
        "mean_episode_s": round(planned_s / max(1, sum(outcomes.values())), 2),
        "busy_share": round(planned_s / (arguments.desktops * wall_s), 4),
        "driver_cpu_s": round(usage.ru_utime + usage.ru_stime, 1),
        "driver_memory_mb": round(usage.ru_maxrss / 1024),
    }


def _plans(count: int) -> list[tuple[Task, EpisodePlan]]:
    tasks = stub_tasks(NUM_TASKS)
    return [
        (
            tasks[index % NUM_TASKS],
            EpisodePlan(
                episode_id=f"stub-{index:06d}",
                purpose=EpisodePurpose.EVALUATE,
                checkpoint_id="stub",
                sampling=STUB_SAMPLING,
            ),
        )
        for index in range(count)
    ]


def _print(console: Console, figures: dict[str, Any], latencies: Latencies) -> None:
    rows = [[name, f"{value:,}" if isinstance(value, int | float) else value] for name, value in figures.items()]
    print_table(console, "Evaluation episodes on Ray actors", ["figure", "value"], rows)
    console.print(
        f"busy: the waiting times of the stubs, divided by desktops times wall time; at least {BUSY_BAR:.0%}: "
        f"{verdict(figures['busy_share'] >= BUSY_BAR)}\n{latencies.describe()}"
    )


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench-cluster", description=__doc__)
    parser.add_argument("--episodes", type=int, default=100_000)
    parser.add_argument("--desktops", type=int, default=1_000)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--scale", type=float, default=0.15, help="factor of all waiting times")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure to FILE")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
