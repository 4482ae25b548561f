"""The processes that train one model together: ranks, collectives and commands.

Under torchrun (or Ray's TorchTrainer) the rank is read from RANK, WORLD_SIZE, LOCAL_RANK and MASTER_*; without these
variables there is one process, and torch.distributed is not used.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous

from osworld_pipeline.errors import TrainingError

JOIN_TIMEOUT_S = 300.0
"""How long the ranks may take to connect."""
COLLECTIVE_TIMEOUT_S = 1800.0
"""Timeout of one collective; the longest wait is for rank 0 to write a large checkpoint."""
COMMAND_TIMEOUT_S = 24 * 3600.0
"""How long rank 0 may collect rollouts before the other ranks stop waiting."""
POLL_S = 30.0
_ERROR = "error"


@dataclass(frozen=True, kw_only=True)
class ProcessGroup:
    rank: int
    world_size: int
    device: torch.device
    store: Any
    """Small messages between the ranks; None for a single process."""
    numbers: Iterator[int] = field(default_factory=count)
    """Numbers the commands of all trainers of this process, so that none receives an earlier trainer's command."""

    @classmethod
    def alone(cls, device: torch.device | str = "cpu") -> "ProcessGroup":
        return cls(rank=0, world_size=1, device=torch.device(device), store=None)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def is_alone(self) -> bool:
        return self.world_size == 1

    def broadcast(self, value: Any = None) -> Any:
        """Rank 0's value on every rank; it must be picklable."""
        if self.is_alone:
            return value
        box = [value]
        with self._exchange("a broadcast"):
            dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value on every rank, by rank."""
        if self.is_alone:
            return [value]
        values: list[Any] = [None] * self.world_size
        with self._exchange("an exchange"):
            dist.all_gather_object(values, value)
        return values

    def open_group(self) -> Any:
        """A gloo group of all ranks for the collectives of a second thread; None for a single rank. Every rank must
        call this."""
        return (
            None if self.is_alone else dist.new_group(backend="gloo", timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S))
        )

    def sum(self, value: float) -> float:
        """The sum over the ranks, in float64 and in rank order."""
        return float(sum(self.gather(value)))

    def report_error(self, message: str) -> None:
        """Publishes an error for the other ranks."""
        if self.store is not None:
            self.store.set(_ERROR, f"rank {self.rank} of {self.world_size} failed: {message}")

    def send_command(self, name: str) -> None:
        """Called on rank 0; the other ranks wait in `next_command`."""
        if self.store is not None:
            self.store.set(f"command/{next(self.numbers)}", name)

    def next_command(self) -> str:
        """Waits for rank 0's next command.

        Raises:
            TrainingError: rank 0 has ended, or sent no command for a day.
        """
        key, waited_s = f"command/{next(self.numbers)}", 0.0
        while waited_s < COMMAND_TIMEOUT_S:
            try:
                self.store.wait([key], timedelta(seconds=POLL_S))
            except dist.DistNetworkError as error:
                raise TrainingError(
                    f"rank {self.rank} of {self.world_size} lost rank 0: its process ended; start the run again, it "
                    "resumes from its last checkpoint"
                ) from error
            except dist.DistStoreError:
                waited_s += POLL_S
            else:
                return self.store.get(key).decode()
        raise TrainingError(
            f"rank {self.rank} of {self.world_size} received nothing from rank 0 for {waited_s:.0f} s: see its log; "
            "start the run again, it resumes from its last checkpoint"
        )

    @contextmanager
    def _exchange(self, what: str) -> Iterator[None]:
        """Converts a failed collective to one clear message: usually another rank has ended and published its error."""
        try:
            yield
        except RuntimeError as error:
            raise TrainingError(self.explain(error, what)) from error

    def is_lost(self, error: RuntimeError) -> bool:
        """Whether an error means that another rank has ended. gloo reports this only in the message."""
        return not self.is_alone and (isinstance(error, dist.DistError) or "onnection" in str(error))

    def explain(self, error: RuntimeError, what: str) -> str:
        """One sentence: the error that the failed rank published, or else that it has ended."""
        left = self._left_word()
        if left:
            return left
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        return (
            f"rank {self.rank} of {self.world_size} lost another rank in {what} ({reason}): that process ended, see "
            "its log; start the run again, it resumes from its last checkpoint"
        )

    def _left_word(self) -> str | None:
        try:
            return self.store.get(_ERROR).decode() if self.store.check([_ERROR]) else None
        except RuntimeError:
            return None


@contextmanager
def open_process_group(environ: Mapping[str, str] | None = None) -> Iterator[ProcessGroup]:
    """The process group of this process while it trains. `environ` replaces the process's environment in tests.

    Raises:
        TrainingError: the other ranks do not connect within five minutes.
    """
    # torchrun and Ray set the rank only in the environment: the library reads it nowhere else.
    variables = os.environ if environ is None else environ
    world_size, rank = int(variables.get("WORLD_SIZE", "1")), int(variables.get("RANK", "0"))
    device = _device(int(variables.get("LOCAL_RANK", "0")))
    if world_size == 1:
        yield ProcessGroup.alone(device)
        return
    store = _join(rank, world_size, device)
    try:
        yield ProcessGroup(rank=rank, world_size=world_size, device=device, store=store)
    finally:
        dist.destroy_process_group()


def _device(local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _join(rank: int, world_size: int, device: torch.device) -> Any:
    """Joins the other ranks; small collectives use gloo, GPU tensors nccl."""
    timeout = timedelta(seconds=JOIN_TIMEOUT_S)
    try:
        store, _, _ = next(iter(rendezvous("env://", rank, world_size, timeout=timeout)))
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=c10d.PrefixStore("group", store),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
        )
    except (dist.DistError, RuntimeError, ValueError, KeyError) as error:
        raise TrainingError(
            f"rank {rank} of {world_size} cannot join the others ({str(error).splitlines()[0]}): check that all of "
            "them are started by one torchrun with the same MASTER_ADDR and MASTER_PORT"
        ) from error
    return c10d.PrefixStore("commands", store)
