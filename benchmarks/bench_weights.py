"""`python -m benchmarks.bench_weights`: the ways in which the trainer's weights reach real sglang servers on this
machine's CPU: a shared folder (the baseline), an upload to a receiver on the servers' machine, a broadcast to all
servers together, and one to each server in turn.

Prints bytes, the seconds that a handover takes, and how long each server samples nothing. Needs the sglang environment
(`osworld-pipeline setup sglang`); each round runs every way once, on the same servers, with changed weights.
"""

import argparse
import asyncio
import itertools
import json
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.processes import started
from benchmarks.spread import Spread, print_table, show_machine
from osworld_pipeline.agent.renderer import Renderer
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import PipelineError
from osworld_pipeline.policy_servers.launch import launched_servers
from osworld_pipeline.recipes import Recipe, load_recipe
from osworld_pipeline.rollout.engines.sglang import SglangEngine
from osworld_pipeline.rollout.engines.sglang_server import SglangServer
from osworld_pipeline.rollout.engines.sglang_weights import Consume, vocab_size_of
from osworld_pipeline.runs.gspo.weights import Broadcast, Handover, ThroughFolder, Write
from osworld_pipeline.training.distributed.process_group import ProcessGroup
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
        figures = {way: {"handover_s": one.handover_s, "paused_s": one.paused_s} for way, one in measured.items()}
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
            )
        )
    console.print()
    num_rounds = len(measured[BASELINE].handover_s)
    title = f"{num_bytes / 1e6:.0f} MB to {num_servers} servers, median (lowest-highest) of {num_rounds} rounds"
    columns = ("way", "handover s", f"{BASELINE} / way", "a server paused s", "MB/s a server")
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
    versions = itertools.count(1)
    port = _free_port()
    receiver = (*(sys.executable, "-m", "osworld_pipeline.cli"), "receive-weights", str(place / "received"))
    with started((*receiver, "--port", str(port), "--keep", "2"), environment={"ENGINE_TOKEN": ""}):
        async with launched_servers(recipe, StateDir(place), checkpoint) as launched:
            launched = _with_port(launched, port)
            for number in range(arguments.rounds + 1):  # the first of each warms up
                for way, settings in WAYS.items():
                    _change(trainer, seed=next(versions))
                    took_s, paused_s = await _hand_over(place, checkpoint, launched, settings, trainer)
                    if number:
                        measured[way].handover_s.append(took_s)
                        measured[way].paused_s += paused_s
    return trainer.num_weight_bytes, measured


def _recipe(arguments: argparse.Namespace) -> Recipe:
    return load_recipe(
        "smoke",
        settings=[
            *("engine.kind=sglang", "engine.launch.device=cpu", f"engine.launch.num_servers={arguments.servers}"),
            *(f"model.hidden_size={arguments.hidden_size}", f"model.num_layers={arguments.layers}"),
            "engine.request_timeout_s=600",
        ],
    )


def _with_port(recipe: Recipe, port: int) -> Recipe:
    return recipe.model_copy(update={"engine": recipe.engine.model_copy(update={"receiver_port": port})})


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _change(trainer: GspoTrainer, *, seed: int) -> None:
    with torch.no_grad():
        next(trainer.model.parameters()).add_(1e-4 * seed)


async def _hand_over(
    place: Path, checkpoint: Path, recipe: Recipe, settings: dict[str, str], trainer: GspoTrainer
) -> tuple[float, list[float]]:
    """Seconds of the handover, and for which each server was paused."""
    section = recipe.engine.model_copy(update=settings)
    engine = SglangEngine(
        section.urls,
        renderer=Renderer(trainer.processor),
        section=section,
        vocab_size=vocab_size_of(checkpoint),
        owner="bench",
    )
    try:
        await engine.health()
        handover = _handover_of(place, checkpoint, engine, trainer, is_folder=section.weights != "broadcast")
        with _pauses() as pauses:
            start = time.perf_counter()
            await (await handover(1))()
            took_s = time.perf_counter() - start
        return took_s, pauses
    finally:
        await engine.close()


def _handover_of(
    place: Path, checkpoint: Path, engine: SglangEngine, trainer: GspoTrainer, *, is_folder: bool
) -> Handover:
    async def load(folder: Path, policy_version: int) -> None:
        await engine.load_weights(folder, policy_version=policy_version)

    async def load_trained(trained: Any, policy_version: int) -> None:
        await engine.load_trained(trained, policy_version=policy_version)

    async def begin(folder: Path) -> Write:
        return await asyncio.to_thread(trainer.save_weights, folder)

    async def save(policy_version: int, folder: Path) -> None:
        await asyncio.to_thread(await begin(folder))

    async def send(policy_version: int, consume: Consume) -> None:
        await asyncio.to_thread(partial(trainer.send_weights, consume))

    if is_folder:
        return ThroughFolder(load, begin, place)
    num_bytes = trainer.num_weight_bytes
    return Broadcast(load_trained, send, save, like=checkpoint, num_bytes=num_bytes, trains_vision=False, parent=place)


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
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--hidden-size", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure to FILE")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
