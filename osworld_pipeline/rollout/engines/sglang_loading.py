"""How weights get into an sglang server: it reads them from a folder that it shares with this program, or to
which `sglang_upload` has copied them, or `sglang_broadcast` sends them."""

from pathlib import Path
from typing import Protocol

from osworld_pipeline.rollout.engines import sglang_locks
from osworld_pipeline.rollout.engines.sglang_server import SglangServer
from osworld_pipeline.rollout.engines.sglang_weights import WeightStream


class LoadWeights(Protocol):
    """Loads weights into a server, under a label."""

    async def __call__(self, server: SglangServer, source: Path | WeightStream, label: str) -> None:
        """Raises TransientError, EngineError: loading failed, and the weights that the server holds are unknown."""
        ...

    async def place(self, server: SglangServer, folder: Path, name: str) -> Path:
        """The path under which the server can read an adapter's folder. `name`: that of its content.

        Raises:
            TransientError, EngineError: the server cannot read it.
        """
        ...

    def limit_s(self, source: Path | WeightStream) -> float:
        """How long a load may take, during which no other program loads weights into the server."""
        ...

    async def close(self) -> None: ...


class FromFolder:
    """The server reads a folder that it sees under the same path."""

    async def __call__(self, server: SglangServer, source: Path | WeightStream, label: str) -> None:
        assert isinstance(source, Path), "the trainer writes a folder"
        await server.load_weights(source, label)

    async def place(self, server: SglangServer, folder: Path, name: str) -> Path:
        return folder

    def limit_s(self, source: Path | WeightStream) -> float:
        # The server answers no other program during a load, so that the lock cannot expire in one.
        return sglang_locks.LOAD_LOCK_LIMIT_S

    async def close(self) -> None: ...
