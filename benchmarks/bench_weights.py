"""`python -m benchmarks.bench_weights`: the ways in which the trainer's weights reach real sglang servers on this
machine's CPU: a shared folder (the baseline), an upload to a receiver on the servers' machine, a broadcast to all
servers together, and one to each server in turn.

Prints bytes, the seconds that a handover takes, how long each server samples nothing, and when the trainer can take the
first optimiser step of its next update: if it scores the batch after the handover, and if it scores meanwhile, as in an
asynchronous phase. Needs the sglang environment (`osworld-pipeline setup sglang`); each round runs every way twice, on
the same servers, with changed weights. The updates end before their optimiser steps.
"""

import argparse
import asyncio
import json
import random
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.processes import started
from benchmarks.spread import Spread, print_table, show_machine
from osworld_pipeline.agent.renderer import Renderer
from osworld_pipeline.domain.episode import SamplingParams
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.domain.trajectory import Trajectory
from osworld_pipeline.errors import PipelineError
from osworld_pipeline.policy_servers.launch import launched_servers
from osworld_pipeline.recipes import Recipe, load_recipe
from osworld_pipeline.rollout.canary import sample_canary
from osworld_pipeline.rollout.engines.sglang import SglangEngine
from osworld_pipeline.rollout.engines.sglang_server import SglangServer
from osworld_pipeline.rollout.engines.sglang_weights import vocab_size_of
from osworld_pipeline.runs.gspo.trainer_thread import TrainerThread
from osworld_pipeline.runs.gspo.weight_transfer import WeightTransfer
from osworld_pipeline.runs.gspo.weights import Broadcast, Handover, ThroughFolder, Write
from osworld_pipeline.training.distributed.process_group import ProcessGroup
from osworld_pipeline.training.objective.score import score_trajectories
from osworld_pipeline.training.policy_trainer import open_gspo_trainer
from osworld_pipeline.training.tiny.model import build_tiny_checkpoint
from osworld_pipeline.training.update import GspoTrainer

WAYS = {
    "folder": {"weights": "folder"},
    "upload": {"weights": "upload"},
    "broadcast, together": {"weights": "broadcast", "update_servers": "together"},
    "broadcast, rolling": {"weights": "broadcast", "update_servers": "rolling"},
}
BASELINE = "folder"


@dataclass(kw_only=True)
class Measured:
    handover_s: list[float] = field(default_factory=list)
    paused_s: list[float] = field(default_factory=list)
    """Pause of each server in each handover."""
    step_after_s: list[float] = field(default_factory=list)
    """Until the first optimiser step, if the batch is scored after the handover."""
    step_meanwhile_s: list[float] = field(default_factory=list)
    """The same if it is scored meanwhile."""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    console = Console(width=max(120, Console().width))
    about = show_machine(console)
    try:
        with tempfile.TemporaryDirectory(prefix="bench-weights-") as place:
            num_bytes, measured = asyncio.run(_measure(Path(place), arguments))
    except PipelineError as error:
        print(f"bench-weights: {error}", file=sys.stderr)
        return 1
    _print(console, num_bytes, measured, num_servers=arguments.servers)
    if arguments.json is not None:
        figures = {way: asdict(one) for way, one in measured.items()}
        document = {"machine": about, "num_bytes": num_bytes, "num_servers": arguments.servers, "ways": figures}
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0


def _print(console: Console, num_bytes: int, measured: dict[str, Measured], *, num_servers: int) -> None:
    baseline = Spread.of(measured[BASELINE].handover_s).median
    rows = []
    for way, one in measured.items():
        spread = Spread.of(one.handover_s)
        rows.append(
            (
                way,
                spread.range_text(2),
                f"{baseline / spread.median:.2f}x",
                Spread.of(one.paused_s).range_text(2),
                f"{num_bytes / spread.median / 1e6:.0f}",
                Spread.of(one.step_after_s).range_text(2),
                Spread.of(one.step_meanwhile_s).range_text(2),
                f"{Spread.of(one.step_after_s).median / Spread.of(one.step_meanwhile_s).median:.2f}x",
            )
        )
    console.print()
    num_rounds = len(measured[BASELINE].handover_s)
    title = f"{num_bytes / 1e6:.0f} MB to {num_servers} servers, median (lowest-highest) of {num_rounds} rounds"
    columns = (
        *("way", "handover s", f"{BASELINE} / way", "a server paused s", "MB/s a server"),
        *("first step s, scored after", "meanwhile", "after / meanwhile"),
    )
    print_table(console, title, columns, rows)


async def _measure(place: Path, arguments: argparse.Namespace) -> tuple[int, dict[str, Measured]]:
    recipe = _recipe(arguments)
    torch.set_num_threads(1)
    checkpoint = place / "checkpoint"
    assert recipe.model.kind == "tiny", "set above"
    build_tiny_checkpoint(checkpoint, recipe.model, ["Action: click the button."])
    trainer = open_gspo_trainer(
        checkpoint,
        reference_folder=checkpoint,
        recipe=recipe,
        phase=recipe.gspo.phase1,
        process_group=ProcessGroup.alone(),
    )
    measured = {way: Measured() for way in WAYS}
    port = _free_port()
    receiver = (*(sys.executable, "-m", "osworld_pipeline.cli"), "receive-weights", str(place / "received"))
    with (
        TrainerThread() as thread,
        started((*receiver, "--port", str(port), "--keep", "2"), environment={"ENGINE_TOKEN": ""}),
    ):
        batch = await thread(partial(_batch, trainer, arguments.sequences))
        async with launched_servers(recipe, StateDir(place), checkpoint) as launched:
            launched = _with_port(launched, port)
            for number in range(arguments.rounds + 1):  # the first of each warms up
                for way, settings in WAYS.items():
                    bench = _Bench(place, checkpoint, launched, settings, trainer, thread, batch)
                    after, meanwhile = await bench.run(is_overlapped=False), await bench.run(is_overlapped=True)
                    if number:
                        measured[way].handover_s.append(after.handover_s)
                        measured[way].paused_s += after.paused_s
                        measured[way].step_after_s.append(after.step_s)
                        measured[way].step_meanwhile_s.append(meanwhile.step_s)
    return trainer.num_weight_bytes, measured


def _batch(trainer: GspoTrainer, num_sequences: int) -> list[Trajectory]:
    """Sequences of 100 prompt and 100 response tokens without meaning, sampled by weights of an update before."""
    rng, vocabulary = random.Random(0), Renderer(trainer.processor).encode("abcdefghij klm nop")
    drawn = [
        Trajectory(
            trajectory_id=f"s{number}",
            task_id="t",
            token_ids=tuple(rng.choices(vocabulary, k=200)),
            response_mask=(0,) * 100 + (1,) * 100,
            images=(),
            advantage=rng.choice([-1.0, 1.0]),
        )
        for number in range(num_sequences)
    ]
    scored = score_trajectories(trainer.model, trainer.processor, drawn)
    # The sampler's log-probabilities differ so much from the trainer's that the update is held after it is scored
    # (gspo.min_effective_share).
    return [
        replace(one, sampled_logprobs=tuple((row + rng.random()).tolist()), policy_versions=(-1,) * 200)
        for one, row in zip(drawn, scored, strict=True)
    ]


@dataclass(frozen=True, kw_only=True)
class _Run:
    handover_s: float
    paused_s: list[float]
    step_s: float


class _NoGroups:
    """A collector without groups."""

    async def advance(self, update: int) -> None: ...


@dataclass(frozen=True)
class _Bench:
    place: Path
    checkpoint: Path
    recipe: Recipe
    settings: dict[str, str]
    trainer: GspoTrainer
    thread: TrainerThread
    batch: Sequence[Trajectory]

    async def run(self, *, is_overlapped: bool) -> _Run:
        """One handover and the next update."""
        section = self.recipe.engine.model_copy(update=self.settings)
        engine = SglangEngine(
            section.urls,
            renderer=Renderer(self.trainer.processor),
            section=section,
            vocab_size=vocab_size_of(self.checkpoint),
            owner="bench",
        )
        try:
            await engine.health()
            collector: Any = _NoGroups()
            with _pauses() as pauses:
                async with WeightTransfer(self._handover(engine), collector, is_overlapped=is_overlapped) as transfer:
                    await self.thread(self._change_weights)
                    start = time.perf_counter()
                    await transfer.begin(self.trainer.num_updates)
                    metrics = await self._update(engine, transfer, is_overlapped=is_overlapped)
                    step_s = time.perf_counter() - start
                    assert metrics["is_held"], "the update ends with its scoring"
                    handed_over = await transfer.end()
            return _Run(handover_s=handed_over["handover_s"], paused_s=pauses, step_s=step_s)
        finally:
            await engine.close()

    async def _update(self, engine: SglangEngine, transfer: WeightTransfer, *, is_overlapped: bool) -> dict[str, float]:
        async def canaries() -> Sequence[Trajectory]:
            await transfer.wait()
            canary = await sample_canary(
                self.batch,
                update=self.trainer.num_updates,
                generate=engine.generate,
                sampling=SamplingParams(temperature=1.0, max_new_tokens=8, stop=(), seed=0),
                image_id=Renderer(self.trainer.processor).image_id,
            )
            return (canary,)

        if is_overlapped:
            return await self.thread.update(self.trainer, self.batch, canaries())
        arrived = await canaries()
        return await self.thread(partial(self.trainer.update, [*self.batch, *arrived]))

    def _change_weights(self) -> None:
        with torch.no_grad():
            next(self.trainer.model.parameters()).add_(1e-4 * (1 + self.trainer.num_updates))

    def _handover(self, engine: SglangEngine) -> Handover:
        async def load(folder: Path, policy_version: int) -> None:
            await engine.load_weights(folder, policy_version=policy_version)

        async def load_trained(trained: Any, policy_version: int) -> None:
            await engine.load_trained(trained, policy_version=policy_version)

        async def begin(folder: Path) -> Write:
            return await self.thread(partial(self.trainer.save_weights, folder))

        async def save(policy_version: int, folder: Path) -> None:
            await asyncio.to_thread(await begin(folder))

        if self.settings["weights"] != "broadcast":
            return ThroughFolder(load, begin, self.place)
        return Broadcast(
            load_trained,
            partial(self.thread.send, self.trainer),
            save,
            like=self.checkpoint,
            num_bytes=self.trainer.num_weight_bytes,
            trains_vision=False,
            parent=self.place,
        )


def _recipe(arguments: argparse.Namespace) -> Recipe:
    return load_recipe(
        "smoke",
        settings=[
            *("engine.kind=sglang", "engine.launch.device=cpu", f"engine.launch.num_servers={arguments.servers}"),
            *(f"model.hidden_size={arguments.hidden_size}", f"model.num_layers={arguments.layers}"),
            *("engine.request_timeout_s=600", "gspo.kl_coef=0", "gspo.min_effective_share=1"),
        ],
    )


def _with_port(recipe: Recipe, port: int) -> Recipe:
    return recipe.model_copy(update={"engine": recipe.engine.model_copy(update={"receiver_port": port})})


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def _pauses() -> Iterator[list[float]]:
    """The seconds between the pause of a server and its end, during the block."""
    began: dict[SglangServer, float] = {}
    pauses: list[float] = []
    pause, go_on = SglangServer.pause_generation, SglangServer.continue_generation

    async def timed_pause(self: SglangServer) -> None:
        began[self] = time.perf_counter()
        await pause(self)

    async def timed_end(self: SglangServer) -> None:
        await go_on(self)
        if self in began:
            pauses.append(time.perf_counter() - began.pop(self))

    SglangServer.pause_generation, SglangServer.continue_generation = timed_pause, timed_end  # type: ignore[method-assign]
    try:
        yield pauses
    finally:
        SglangServer.pause_generation, SglangServer.continue_generation = pause, go_on  # type: ignore[method-assign]


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench-weights", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--sequences", type=int, default=16, help="of 200 tokens in an update")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure to FILE")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
