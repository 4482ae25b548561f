"""How busy environments are with the asynchronous collector, compared with a batch-synchronous loop of the same
episodes, in which a batch ends before the trainer begins, and the trainer ends before the next batch begins."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from benchmarks.rollout_stub import STUB_SAMPLING, Latencies, StubEpisodes, TrainAll, stub_tasks
from benchmarks.spread import Spread, print_table, verdict
from osworld_pipeline.domain.group import GroupStatus, RolloutGroup
from osworld_pipeline.domain.task import Task
from osworld_pipeline.recipes.schema import RolloutSection
from osworld_pipeline.rollout.async_collector import AsynchronousCollector
from osworld_pipeline.rollout.collector import Collector, SynchronousCollector
from osworld_pipeline.rollout.run_group import GroupPlan, in_turn, run_group
from osworld_pipeline.rollout.task_sampling import RoundRobin
from osworld_pipeline.rollout.utilisation import BusyMeter, Utilisation, metered

NUM_SLOTS = 64
GROUP_SIZE = 8
GROUPS_PER_UPDATE = 8
NUM_UPDATES = 20
NUM_SYNCHRONOUS_UPDATES = 8
"""The batch-synchronous loop has no warm-up phase, so fewer updates suffice."""
BAR = 2.5
STALENESSES = (1, 2, 4)


@dataclass(frozen=True, kw_only=True)
class LoopFigures:
    environments_busy: float
    trainer_busy: float
    episodes_per_s: float
    """Trained episodes, in seconds before scaling."""
    num_stale: int


def run_loops(console: Console, *, rounds: int) -> list[dict[str, Any]]:
    """Print the comparison; returns its figures."""
    latencies = Latencies()
    found: dict[int | None, list[LoopFigures]] = {None: [], **{bound: [] for bound in STALENESSES}}
    for number in range(rounds):
        for bound in found:
            found[bound].append(asyncio.run(_run_loop(latencies, seed=f"round{number}", max_staleness=bound)))
    base = found[None]
    rows: list[list[str]] = []
    results: list[dict[str, Any]] = []
    for bound, figures in found.items():
        busy = Spread.of(
            one.environments_busy / other.environments_busy for one, other in zip(figures, base, strict=True)
        )
        speed = Spread.of(one.episodes_per_s / other.episodes_per_s for one, other in zip(figures, base, strict=True))
        idle = Spread.of(1.0 - one.trainer_busy for one in figures)
        share = Spread.of(one.environments_busy for one in figures)
        is_default = bound == RolloutSection().max_staleness
        name = (
            "batch-synchronous"
            if bound is None
            else f"asynchronous, max_staleness {bound}{' (the default)' if is_default else ''}"
        )
        met = verdict(busy.median >= BAR) if is_default else ""
        rows.append(
            [name, share.range_text(2), f"{busy.range_text(2)}x", f"{speed.range_text(2)}x", idle.range_text(2),
             f"{max(one.num_stale for one in figures)}", met]
        )  # fmt: skip
        results.append(
            {"bench": "loops", "loop": name, "environments_busy": share.fields(), "utilisation_ratio": busy.fields(),
             "episodes_ratio": speed.fields(), "trainer_idle": idle.fields()}
        )  # fmt: skip
    title = f"Environments busy: {NUM_SLOTS} episodes in flight, {GROUPS_PER_UPDATE} groups of {GROUP_SIZE} an update"
    columns = (
        "loop",
        "environments busy",
        "ratio",
        "trained episodes/s",
        "trainer idle",
        "stale groups",
        f"bar {BAR}x",
    )
    print_table(console, title, columns, rows)
    console.print(f"{latencies.describe()}. The limit is all environments busy: {_limit(base)}x.")
    return results


def _limit(base: Sequence[LoopFigures]) -> str:
    return Spread.of(1.0 / one.environments_busy for one in base).range_text(2)


async def _run_loop(latencies: Latencies, *, seed: str, max_staleness: int | None) -> LoopFigures:
    """`max_staleness` None: the batch-synchronous loop."""
    episodes = StubEpisodes(latencies)
    utilisation = Utilisation(environments=BusyMeter(NUM_SLOTS))
    run_one = in_turn(metered(episodes, utilisation.environments), NUM_SLOTS)

    async def run(task: Task, group_id: str, update: int) -> RolloutGroup:
        plan = GroupPlan(
            stage_key=seed, update=update, group_size=GROUP_SIZE, checkpoint_id="stub", sampling=STUB_SAMPLING
        )
        return await run_group(task, plan, group_id, run_one=run_one)

    num_updates = NUM_SYNCHRONOUS_UPDATES if max_staleness is None else NUM_UPDATES
    started = time.monotonic()
    num_trained = num_stale = 0
    async with _open_collector(run, seed, max_staleness) as collector:
        for update in range(num_updates):
            batch = await collector.collect(update)
            num_trained += len(batch.trajectories)
            num_stale += batch.num_groups(GroupStatus.STALE)
            with utilisation.trainer.busy():
                await asyncio.sleep(latencies.train_s * latencies.scale)
            episodes.version = update + 1
            if update + 1 < num_updates:
                await collector.advance(update + 1)
        shares = utilisation.metrics()
    elapsed_s = (time.monotonic() - started) / latencies.scale
    return LoopFigures(
        environments_busy=shares["environments_busy_overall"],
        trainer_busy=shares["trainer_busy_overall"],
        episodes_per_s=num_trained / elapsed_s,
        num_stale=num_stale,
    )


def _open_collector(run: Any, seed: str, max_staleness: int | None) -> Collector:
    sampler = RoundRobin(stub_tasks(40), seed=seed, tasks_per_update=GROUPS_PER_UPDATE)
    shared: dict[str, Any] = {"stage_key": seed, "groups_per_update": GROUPS_PER_UPDATE}
    if max_staleness is None:
        return SynchronousCollector(run, TrainAll(), sampler, section=RolloutSection(), **shared)
    section = RolloutSection(mode="asynchronous", max_staleness=max_staleness)
    return AsynchronousCollector(run, TrainAll(), sampler, section=section, num_updates=NUM_UPDATES, **shared)
