"""Hands the trainer's weights to the engine that samples: in place, in memory, through a folder, or through
a process group."""

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

from osworld_pipeline.agent.adapters import FOLDER as ADAPTER_FOLDER
from osworld_pipeline.recipes import Recipe
from osworld_pipeline.rollout.engines.sglang_weights import (
    Consume,
    TrainedWeights,
    WeightStream,
    vision_digest,
    weight_bytes,
    write_digest,
)

ReadWeights = Callable[[], Awaitable[Mapping[str, Any]]]
"""Reads the trainer's weights, or the adapter's factors under LoRA; they do not change before the next update."""
SaveVersion = Callable[[int, Path], Awaitable[None]]
"""Writes the weights of a policy version to a folder. Raises as `SendWeights`, and StoreError."""
Write = Callable[[], None]
"""Writes weights. Blocks; they must not change before it returns. Raises StoreError."""
SaveWeights = Callable[[Path], Awaitable[Write]]
"""Begins to save the trainer's weights to a folder. Raises StoreError."""
LoadWeights = Callable[[Path, int], Awaitable[None]]
"""Loads a folder with its policy version into all engines. Raises EngineError."""
LoadTrained = Callable[[TrainedWeights, int], Awaitable[None]]
"""Loads the trainer's weights with their policy version into all engines. Raises EngineError."""
SendWeights = Callable[[int, Consume], Awaitable[None]]
"""Sends the trainer's weights. Raises TransientError if they are no longer those of the policy version."""
Deliver = Callable[[], Awaitable[int]]
"""Gives the engine the weights; it samples with them when this returns. They must not change before. Returns the bytes
of weights that left this process, once for all servers.

Raises:
    EngineError: the engine cannot load them.
    StoreError: they cannot be written.
"""
PREFIX = "weights-"


class Handover(Protocol):
    async def __call__(self, policy_version: int) -> Deliver:
        """Takes the trainer's weights; its thread is free when this returns. Raises as `Deliver`."""
        ...


class InPlace:
    """The engine samples from the trainer's own model, which changes only while nothing is sampled."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    async def __call__(self, policy_version: int) -> Deliver:
        async def deliver() -> int:
            self._engine.mark_updated(policy_version=policy_version)
            return 0

        return deliver


class InMemory:
    """Copies within one process; running episodes continue."""

    def __init__(self, engine: Any, read: ReadWeights) -> None:
        self._engine = engine
        self._read = read

    async def __call__(self, policy_version: int) -> Deliver:
        weights = await self._read()

        async def deliver() -> int:
            await self._engine.load_state(weights, policy_version=policy_version)
            return 0

        return deliver


class ThroughFolder:
    """A folder that trainer and servers share. The last one stays until the next is loaded, because a server that
    rejoins must find it. It is written separately from the checkpoint, whose optimiser state is several times as large
    and is still being written."""

    def __init__(self, load: LoadWeights, save: SaveWeights, parent: Path) -> None:
        """`parent`: the parent folder; such folders of a killed run are removed from it."""
        self._load = load
        self._save = save
        self._parent = parent
        self._written: Path | None = None
        for folder in parent.glob(f"{PREFIX}*"):
            shutil.rmtree(folder, ignore_errors=True)

    async def __call__(self, policy_version: int) -> Deliver:
        folder = self._parent / f"{PREFIX}{policy_version:04d}"
        return partial(self._deliver, folder, await self._save(folder), policy_version)

    async def _deliver(self, folder: Path, write: Write, policy_version: int) -> int:
        await asyncio.to_thread(write)
        # The digest is stored with it, so that the engines need not read all weights to identify them.
        await asyncio.to_thread(write_digest, folder)
        await self._load(folder, policy_version)
        if self._written is not None:
            await asyncio.to_thread(shutil.rmtree, self._written, ignore_errors=True)
        self._written = folder
        return await asyncio.to_thread(lambda: weight_bytes(folder) + weight_bytes(folder / ADAPTER_FOLDER))


class Broadcast:
    """Sends weights through a process group with the servers; a folder is written only for a new comparison of the only
    server. A server that restarts before the next update receives the weights again."""

    def __init__(
        self,
        load: LoadTrained,
        send: SendWeights,
        save: SaveVersion,
        *,
        like: Path,
        num_bytes: int,
        trains_vision: bool,
        parent: Path,
    ) -> None:
        """`like`: a checkpoint with tensors of the same names. `parent`: for a folder that is written only if the only
        server must be compared again."""
        self._load = load
        self._send = send
        self._save = save
        self._like = like
        self._num_bytes = num_bytes
        self._trains_vision = trains_vision
        self._saved = parent / f"{PREFIX}compared"
        shutil.rmtree(self._saved, ignore_errors=True)

    async def __call__(self, policy_version: int) -> Deliver:
        return partial(self._deliver, policy_version)

    async def _deliver(self, policy_version: int) -> int:
        await asyncio.to_thread(shutil.rmtree, self._saved, ignore_errors=True)
        name = f"sent-{uuid4().hex[:19]}"
        trained = TrainedWeights(
            name=name,
            like=self._like,
            vision=name if self._trains_vision else await asyncio.to_thread(vision_digest, self._like),
            stream=WeightStream(num_bytes=self._num_bytes, run=partial(self._send, policy_version)),
            save=partial(self._saved_once, policy_version),
        )
        await self._load(trained, policy_version)
        return self._num_bytes

    async def _saved_once(self, policy_version: int) -> Path:
        if not self._saved.is_dir():
            await self._save(policy_version, self._saved)
        return self._saved


def shares_model(recipe: Recipe, trainer: Any) -> bool:
    """Whether the engine may sample from the trainer's own model: nothing trains while it samples."""
    is_alone = recipe.rollout.mode == "synchronous" and recipe.engine.kind == "transformers"
    return is_alone and trainer.shares_weights
