"""The process group through which one program sends weights to the ranks of sglang servers, and the buckets that it
sends. Rank 0 sends; the group exists for one transfer.

sglang joins with its own copy of `torch.distributed.init_process_group` for a second group
(`sglang.srt.utils.init_custom_process_group`); `_new_group` makes the same calls, so that both sides agree on the keys
of the store.
"""

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch.distributed import distributed_c10d as c10d

from osworld_pipeline.errors import EngineError
from osworld_pipeline.rollout.engines.sglang_weights import WEIGHTS

_dist: Any = dist  # its stores are public and not in its list of exports
_private: Any = c10d  # docs/decisions/0052 says why
BUCKET_BYTES = 256 << 20
"""A bucket ends before it exceeds this size; a larger tensor is a bucket of its own."""
FIRST_POLL_S, MAX_POLL_S = 0.0005, 0.02


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Tensors of one dtype as one array of bytes, one after the other: sglang's format `flattened_bucket`."""

    names: tuple[str, ...]
    dtype: str
    """Name of an attribute of torch: `bfloat16`."""
    shapes: tuple[tuple[int, ...], ...]
    data: torch.Tensor


class Packer:
    """Packs tensors into buckets. A bucket is emitted when the next tensor does not fit or has another dtype; `finish`
    emits the last one."""

    def __init__(self, emit: Callable[[Bucket, bool], None], *, max_bytes: int = BUCKET_BYTES) -> None:
        """`emit`: receives each bucket, and whether it is the last."""
        self._emit = emit
        self._max_bytes = max_bytes
        self._tensors: list[tuple[str, torch.Tensor]] = []
        self._num_bytes = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """`tensor`: may change only after its bucket was emitted."""
        is_other = bool(self._tensors) and tensor.dtype != self._tensors[0][1].dtype
        if self._tensors and (is_other or self._num_bytes + tensor.nbytes > self._max_bytes):
            self._flush(is_last=False)
        self._tensors.append((name, tensor.detach()))
        self._num_bytes += tensor.nbytes

    def finish(self) -> None:
        assert self._tensors, "a policy has weights"
        self._flush(is_last=True)

    def _flush(self, *, is_last: bool) -> None:
        tensors, self._tensors, self._num_bytes = self._tensors, [], 0
        bucket = Bucket(
            names=tuple(name for name, _ in tensors),
            dtype=str(tensors[0][1].dtype).removeprefix("torch."),
            shapes=tuple(tuple(tensor.shape) for _, tensor in tensors),
            data=torch.cat([tensor.contiguous().flatten().view(torch.uint8) for _, tensor in tensors]),
        )
        self._emit(bucket, is_last)


class UpdateGroup:
    """Call `connect` while the servers join; then `broadcast` for each bucket, and `close`."""

    def __init__(self, *, address: str, world_size: int, timeout_s: float) -> None:
        """`address`: of this host, as the servers reach it; the store listens on no other. `timeout_s`: limit of each
        step.

        Raises:
            EngineError: this host has no such address.
        """
        self.name = f"osworld-weights-{uuid4().hex[:12]}"
        self._world_size = world_size
        self._timeout = timedelta(seconds=timeout_s)
        self._group: Any = None
        try:
            listener = socket.create_server((address, 0), family=_family(address))
        except OSError as error:
            raise EngineError(
                f"weights cannot be sent from {address} ({error}): set engine.weights_address to an address of this "
                "host that the policy servers reach"
            ) from error
        self.port = int(listener.getsockname()[1])
        # Before any server is asked to join: one that finds no store would look for it for half an hour.
        self._store: Any = _dist.TCPStore(
            address,
            self.port,
            world_size,
            is_master=True,
            timeout=self._timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )

    def connect(self, device: torch.device) -> None:
        """Waits until all ranks have joined. `device`: of the buckets that will be sent.

        Raises:
            EngineError: a rank did not join in time.
        """
        backend = backend_for(device)
        # NCCL ends the whole program at its own time limit; `broadcast` stops earlier.
        timeout = self._timeout if backend == "gloo" else 4 * self._timeout
        try:
            self._group = _new_group(
                self._store, self.name, backend=backend, world_size=self._world_size, timeout=timeout
            )
        except RuntimeError as error:
            raise EngineError(f"not all ranks of the policy servers have joined: {_first(error)}") from error

    def broadcast(self, data: torch.Tensor, *, is_stopped: Callable[[], bool]) -> None:
        """Sends bytes to all ranks. `is_stopped`: whether a server has failed, after which the rest never arrives.

        Raises:
            EngineError: it was stopped, or a rank was lost.
        """
        options = dist.BroadcastOptions()
        options.rootRank = 0
        try:
            work = self._group.broadcast([data], options)
            self._wait(work, is_stopped)
            work.wait()
        except RuntimeError as error:
            raise EngineError(f"a rank of a policy server was lost: {_first(error)}") from error

    def close(self) -> None:
        """Never raises."""
        if self._group is not None:
            with suppress(RuntimeError):
                self._group.abort()
            with suppress(RuntimeError):
                dist.destroy_process_group(self._group)
        self._group = self._store = None

    def _wait(self, work: Any, is_stopped: Callable[[], bool]) -> None:
        """Polls, because a broadcast to a server that has refused it would last until the time limit."""
        deadline, pause_s = time.monotonic() + self._timeout.total_seconds(), FIRST_POLL_S
        while not work.is_completed():
            if is_stopped():
                raise EngineError("a policy server refused the weights")
            if time.monotonic() > deadline:
                raise EngineError(f"a bucket was not received within {self._timeout.total_seconds():g} s")
            time.sleep(pause_s)
            pause_s = min(MAX_POLL_S, 2 * pause_s)


def backend_for(device: torch.device) -> str:
    """NCCL between GPUs, otherwise gloo, which also works for a server on a GPU, by a copy through host memory."""
    return "nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo"


def read_weights_of(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of a checkpoint folder by name, one after the other.

    Raises:
        EngineError: a file cannot be read.
    """
    try:
        for path in sorted(folder.glob(WEIGHTS)):
            with safe_open(path, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - it has no iterator
                    yield name, opened.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise EngineError(f"the weights at {folder} cannot be read: {error}") from error


def _new_group(store: Any, name: str, *, backend: str, world_size: int, timeout: timedelta) -> Any:
    group, _ = _private._new_process_group_helper(
        world_size,
        0,
        [],
        dist.Backend(backend),
        _dist.PrefixStore(name, store),
        group_name=name,
        timeout=timeout,
    )
    _private._world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
    return group


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _first(error: RuntimeError) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
