"""Copies weights to the disk of each sglang server's machine, through the receiver that runs there
(`osworld-pipeline receive-weights`); the server then reads them from a folder of its own machine."""

import asyncio
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit
from uuid import uuid4

import orjson

from osworld_pipeline.errors import EngineError
from osworld_pipeline.rollout.engines.http_calls import JsonClient, TransientError, shown
from osworld_pipeline.rollout.engines.sglang_server import CONTROL_TIMEOUT_S, SglangServer
from osworld_pipeline.rollout.engines.sglang_weights import WEIGHTS, Label, WeightStream, weight_bytes

OTHER_FILES = ("config.json", "adapter_config.json", "*.safetensors.index.json")
CHUNK_BYTES = 4 << 20
LEAST_RATE = 50e6
"""Bytes per second that an upload must reach, as a mean."""


class Upload:
    """Implements LoadWeights. Weights that a receiver already has are not sent again; servers of one machine share
    them. Use it from one event loop."""

    def __init__(self, client: JsonClient, *, port: int) -> None:
        """`client`: sends the servers' token. `port`: of the receiver on each server's machine."""
        self._client = client
        self._port = port
        self._turns: dict[str, asyncio.Lock] = {}
        """A lock of each receiver, which gets one upload at a time."""

    async def __call__(self, server: SglangServer, source: Path | WeightStream, label: str) -> None:
        assert isinstance(source, Path), "the trainer writes a folder"
        server.held = None
        await server.load_weights(await self.place(server, source, Label.parse(label).weights), label)

    async def place(self, server: SglangServer, folder: Path, name: str) -> Path:
        receiver = self._receiver_of(server)
        async with self._turns.setdefault(receiver, asyncio.Lock()):
            url = f"{receiver}/v1/weights/{name}"
            answer = await self._client.get(url, timeout_s=CONTROL_TIMEOUT_S, allow_missing=True)
            if "path" not in answer:
                answer = await self._upload(receiver, folder, name)
        return Path(str(answer["path"]))

    def limit_s(self, source: Path | WeightStream) -> float:
        assert isinstance(source, Path), "the trainer writes a folder"
        return 2 * CONTROL_TIMEOUT_S + weight_bytes(source) / LEAST_RATE

    async def close(self) -> None: ...

    async def _upload(self, receiver: str, folder: Path, name: str) -> dict[str, object]:
        upload, sizes = uuid4().hex, dict[str, int]()
        for path, size in await asyncio.to_thread(_files_of, folder):
            sizes[path.name] = size
            sent = _Reader(path)
            url = f"{receiver}/v1/uploads/{upload}/{path.name}"
            limit_s = CONTROL_TIMEOUT_S + size / LEAST_RATE
            answer = await self._client.put(url, sent.chunks(), timeout_s=limit_s)
            if answer.get("crc32") != sent.checksum:
                raise TransientError(f"{shown(receiver)} received {path.name} with another checksum than was sent")
        body = orjson.dumps({"name": name, "files": sizes})
        return await self._client.post(f"{receiver}/v1/uploads/{upload}", body, timeout_s=CONTROL_TIMEOUT_S)

    def _receiver_of(self, server: SglangServer) -> str:
        parts = urlsplit(server.url)
        if not parts.hostname:
            raise EngineError(f"the URL {shown(server.url)} of an sglang server has no host: check engine.urls")
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        return f"{parts.scheme}://{host}:{self._port}"


def _files_of(folder: Path) -> list[tuple[Path, int]]:
    """The files with their sizes."""
    paths = [path for pattern in (WEIGHTS, *OTHER_FILES) for path in sorted(folder.glob(pattern))]
    return [(path, path.stat().st_size) for path in paths]


class _Reader:
    def __init__(self, path: Path) -> None:
        self._path = path
        self.checksum = 0
        """CRC-32 of what was read."""

    async def chunks(self) -> AsyncIterator[bytes]:
        with self._path.open("rb") as file:
            while chunk := await asyncio.to_thread(self._next, file):
                yield chunk

    def _next(self, file: BinaryIO) -> bytes:
        chunk = file.read(CHUNK_BYTES)
        self.checksum = zlib.crc32(chunk, self.checksum)
        return chunk
