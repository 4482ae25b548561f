"""Sends weights to sglang servers over the network, without a folder that both sides see.

Client and servers form a process group for one transfer (`update_group`), and the client broadcasts the weights bucket
by bucket. A server is paused meanwhile: sampled tokens are kept (unless engine.running_responses is "abort"), and
sampling continues with the new weights. During a transfer its label names no weights, so that no engine samples from a
server whose transfer was cut off.
"""

import asyncio
import itertools
import socket
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from uuid import uuid4

from osworld_pipeline.errors import EngineError
from osworld_pipeline.rollout.engines.http_calls import MissingError, TransientError, shown
from osworld_pipeline.rollout.engines.sglang_server import SglangServer
from osworld_pipeline.rollout.engines.sglang_weights import Consume, WeightStream, weight_bytes

if TYPE_CHECKING:
    import torch

    from osworld_pipeline.rollout.engines.update_group import Bucket, UpdateGroup

STEP_TIMEOUT_S = 60.0
"""Limit until the ranks join, and of one bucket."""
LEAST_RATE = 100e6
"""Bytes per second that a transfer must reach, as a mean."""
WINDOW_S = 1.0
"""How long a transfer to all servers waits for those that are still being prepared."""
INCOMPLETE = "incomplete-"
"""Start of a server's label during a transfer."""


def folder_stream(folder: Path) -> WeightStream:
    """The weights of a checkpoint folder, read by this program."""

    def read(consume: Consume) -> None:
        from osworld_pipeline.rollout.engines.update_group import read_weights_of

        consume(read_weights_of(folder))

    async def run(consume: Consume) -> None:
        await asyncio.to_thread(read, consume)

    return WeightStream(num_bytes=weight_bytes(folder), run=run)


def transfer_limit_s(num_bytes: int) -> float:
    """Time limit of a transfer."""
    return 2 * STEP_TIMEOUT_S + num_bytes / LEAST_RATE


@dataclass(kw_only=True, eq=False)
class _Order:
    server: SglangServer
    source: Path | WeightStream
    label: str
    done: "asyncio.Future[None]"


class Broadcaster:
    """Loads weights into servers, one transfer at a time. Orders for the same weights that wait together share one
    transfer. Use it from one event loop."""

    def __init__(self, *, address: str, num_expected: Callable[[], int]) -> None:
        """`address`: of this host, as the servers reach it; empty: found for each transfer. `num_expected`: how many
        orders for the same weights to wait for, at most `WINDOW_S`."""
        self._address = address
        self._num_expected = num_expected
        self._orders: list[_Order] = []
        self._added = asyncio.Event()
        self._worker: asyncio.Task[None] | None = None

    async def __call__(self, server: SglangServer, source: Path | WeightStream, label: str) -> None:
        """Loads weights under a label.

        Raises:
            TransientError, EngineError: the transfer failed, and the weights that the server holds are unknown.
        """
        server.held = None
        order = _Order(server=server, source=source, label=label, done=asyncio.get_running_loop().create_future())
        self._orders.append(order)
        self._added.set()
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        try:
            await order.done
        finally:
            if order in self._orders:  # cancelled before its turn
                self._orders.remove(order)

    async def place(self, server: SglangServer, folder: Path, name: str) -> Path:
        raise EngineError(
            f"{folder} is an adapter, and sglang servers read adapters from a folder: set engine.weights to "
            '"folder" or "upload", or merge the adapter'
        )

    def limit_s(self, source: Path | WeightStream) -> float:
        num_bytes = weight_bytes(source) if isinstance(source, Path) else source.num_bytes
        return transfer_limit_s(num_bytes) + WINDOW_S + STEP_TIMEOUT_S

    async def close(self) -> None:
        """Ends a transfer in progress."""
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)

    async def _work(self) -> None:
        while self._orders:
            await self._wait_for_others()
            if not self._orders:
                return
            batch = self._same_as(self._orders[0])
            self._orders = [order for order in self._orders if order not in batch]
            error: BaseException | None = None
            try:
                await _transfer(batch, self._address)
            except (EngineError, asyncio.CancelledError) as raised:
                error = raised
            except Exception as raised:  # noqa: BLE001 - the callers wait for an answer in any case
                error = EngineError(f"{type(raised).__name__}: {raised}")
            for order in batch:
                if not order.done.done():
                    if error is None:
                        order.done.set_result(None)
                    elif isinstance(error, asyncio.CancelledError):
                        order.done.cancel()
                    else:
                        order.done.set_exception(error)
            if isinstance(error, asyncio.CancelledError):
                raise error

    async def _wait_for_others(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(WINDOW_S):
                while self._orders and len(self._same_as(self._orders[0])) < self._num_expected():
                    self._added.clear()
                    await self._added.wait()

    def _same_as(self, first: _Order) -> list[_Order]:
        return [order for order in self._orders if (order.source, order.label) == (first.source, first.label)]


async def _transfer(batch: Sequence[_Order], address: str) -> None:
    """
    Raises:
        TransientError: another try may succeed.
        EngineError: a server cannot receive weights, or they cannot be read.
    """
    source, label = batch[0].source, batch[0].label
    stream = await asyncio.to_thread(folder_stream, source) if isinstance(source, Path) else source
    servers = [order.server for order in batch]
    sizes = await asyncio.gather(*(server.num_ranks() for server in servers))
    sender = _Sender(
        servers=dict(zip(servers, sizes, strict=True)),
        address=address or await asyncio.to_thread(_address_towards, servers[0].url),
        loop=asyncio.get_running_loop(),
    )
    limit_s = transfer_limit_s(stream.num_bytes)
    try:
        async with asyncio.timeout(limit_s):
            await _send(stream, servers, sender, label)
    except TimeoutError as error:
        raise TransientError(f"{stream.num_bytes / 1e9:.1f} GB were not sent within {limit_s:.0f} s") from error


async def _send(stream: WeightStream, servers: Sequence[SglangServer], sender: "_Sender", label: str) -> None:
    async def prepare(server: SglangServer) -> None:
        await server.pause_generation()
        await server.relabel(f"{INCOMPLETE}{uuid4().hex[:8]}")
        await server.begin_update()

    async def complete(server: SglangServer) -> None:
        await server.end_update()
        await server.relabel(label)
        await server.continue_generation()

    async def give_up(server: SglangServer) -> None:
        for call in (server.end_update, server.continue_generation):
            with suppress(EngineError):  # the error that led here is raised
                await call()

    try:
        await _each(prepare, servers)
        await stream.run(sender.send)
        await sender.close()
        await _each(complete, servers)
    except BaseException:
        # Shielded: a cancelled caller must not leave a server paused.
        await asyncio.shield(asyncio.ensure_future(sender.close()))
        await asyncio.shield(asyncio.ensure_future(_each(give_up, servers)))
        raise


async def _each(call: Callable[[SglangServer], Awaitable[None]], servers: Sequence[SglangServer]) -> None:
    """Raises the first error once all calls have ended."""
    results = await asyncio.gather(*(call(server) for server in servers), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result


@dataclass(kw_only=True, eq=False)
class _Sender:
    """The sending side of one transfer."""

    servers: Mapping[SglangServer, int]
    """The servers with the number of ranks of each."""
    address: str
    loop: asyncio.AbstractEventLoop
    _group: "UpdateGroup | None" = None
    _is_stopped: bool = False
    _turn: threading.Lock = field(default_factory=threading.Lock)
    """Held while a thread uses the group."""

    def send(self, tensors: Iterable[tuple[str, "torch.Tensor"]]) -> None:
        """Implements `Consume`."""
        from osworld_pipeline.rollout.engines.update_group import Packer

        packer = Packer(self._emit)
        for name, tensor in tensors:
            packer.add(name, tensor)
        packer.finish()

    async def close(self) -> None:
        """Stops a thread that still sends, and dissolves the group."""
        self._is_stopped = True
        group = await asyncio.to_thread(self._close_group)
        if group is not None:
            body = {"group_name": group.name}
            calls = (server.update_call("/destroy_weights_update_group", body) for server in self.servers)
            await asyncio.gather(*calls, return_exceptions=True)

    def _close_group(self) -> "UpdateGroup | None":
        with self._turn:
            group, self._group = self._group, None
            if group is not None:
                group.close()
            return group

    def _emit(self, bucket: "Bucket", is_last: bool) -> None:
        with self._turn:
            if self._is_stopped:
                raise TransientError("the transfer was stopped")
            group = self._group or self._open(bucket.data.device)
            body = {
                "names": bucket.names,
                "dtypes": [bucket.dtype] * len(bucket.names),
                "shapes": bucket.shapes,
                "group_name": group.name,
                "load_format": "flattened_bucket",
                "flush_cache": is_last,
            }
            calls = self._post("/update_weights_from_distributed", dict.fromkeys(self.servers, body))
            with _explained(calls):
                group.broadcast(bucket.data, is_stopped=lambda: self._is_stopped or _failed(calls) is not None)
                _wait_for(calls)

    def _open(self, device: "torch.device") -> "UpdateGroup":
        from osworld_pipeline.rollout.engines.update_group import UpdateGroup, backend_for

        world_size = 1 + sum(self.servers.values())
        group = self._group = UpdateGroup(address=self.address, world_size=world_size, timeout_s=STEP_TIMEOUT_S)
        body = {
            "master_address": self.address,
            "master_port": group.port,
            "world_size": world_size,
            "group_name": group.name,
            "backend": backend_for(device),
        }
        offsets = itertools.accumulate(self.servers.values(), initial=1)
        bodies = {server: body | {"rank_offset": offset} for server, offset in zip(self.servers, offsets, strict=False)}
        calls = self._post("/init_weights_update_group", bodies)
        with _explained(calls):
            group.connect(device)
            _wait_for(calls)
        return group

    def _post(self, path: str, bodies: Mapping[SglangServer, Mapping[str, Any]]) -> "_Calls":
        return {
            server: asyncio.run_coroutine_threadsafe(server.update_call(path, body), self.loop)
            for server, body in bodies.items()
        }


_Calls = Mapping[SglangServer, "Future[None]"]


def _wait_for(calls: _Calls) -> None:
    for call in calls.values():
        call.result(2 * STEP_TIMEOUT_S)


@contextmanager
def _explained(calls: _Calls) -> Iterator[None]:
    """Raises the first server's own error, or else that of the group."""
    try:
        yield
    except EngineError as error:
        failed = _failed(calls)
        if failed is None:
            raise TransientError(str(error)) from error
        server, reason = failed
        if isinstance(reason, MissingError):
            raise EngineError(f"{shown(server.url)} cannot receive weights: use a newer sglang") from reason
        raise TransientError(f"{shown(server.url)} did not receive the weights: {reason}") from reason
    finally:
        for call in calls.values():
            call.cancel()  # no effect on those that have ended


def _failed(calls: _Calls) -> tuple[SglangServer, BaseException] | None:
    for server, call in calls.items():
        if call.done() and not call.cancelled() and (error := call.exception()) is not None:
            return server, error
    return None


def _address_towards(url: str) -> str:
    """The address of this host on its route to a server. Sends nothing.

    Raises:
        TransientError: the server's name cannot be resolved, or there is no route.
    """
    parts = urlsplit(url)
    try:
        family, _, _, _, target = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise TransientError(f"there is no route to {shown(url)}: {error}") from error
