"""What an update does between the passes that score its batch: the weights do not change then, so they can be sent to
the servers that sample, and trajectories that the servers have sampled with these weights can still join the batch."""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch

from osworld_pipeline.domain.trajectory import Trajectory
from osworld_pipeline.training.distributed.process_group import ProcessGroup
from osworld_pipeline.training.distributed.shared_trajectories import ReadImage, share_trajectories

Consume = Callable[[Iterable[tuple[str, torch.Tensor]]], None]
"""Sends tensors by name. Blocks."""


class Arrivals(Protocol):
    """What arrives on rank 0 for a running update."""

    def due(self) -> Consume | None:
        """A receiver of the weights that waits now; does not block."""
        ...

    def next(self) -> Consume | Sequence[Trajectory]:
        """Waits for the next receiver, or for the canaries of this update, which arrive last.

        Raises:
            EngineError, StoreError: the servers that sample cannot get the weights.
            TrainingError: neither arrives in time.
        """
        ...


class BetweenPasses:
    """One update's breaks. Every rank must call the same methods in the same order."""

    def __init__(
        self, process_group: ProcessGroup, send: Callable[[Consume | None], object], arrivals: Arrivals | None
    ) -> None:
        """`send`: gathers the weights on all ranks and passes them to rank 0's receiver; it returns the receiver's
        EngineError, which does not stop the update. `arrivals`: rank 0's; None there if nothing can arrive."""
        self._process_group = process_group
        self._send = send
        self._arrivals = arrivals
        self._is_open = bool(process_group.broadcast(arrivals is not None))

    def serve(self) -> None:
        """Sends the weights if a receiver waits."""
        if self._is_open:
            self._sent(None if self._arrivals is None else self._arrivals.due())

    def canaries(self, read_image: ReadImage | None) -> Sequence[Trajectory]:
        """Sends the weights to each receiver, until the canaries arrive. Raises as Arrivals.next."""
        arrived: Consume | Sequence[Trajectory] = ()
        while self._is_open:
            arrived = () if self._arrivals is None else self._arrivals.next()
            self._is_open = self._sent(arrived if callable(arrived) else None)
        return share_trajectories(() if callable(arrived) else arrived, self._process_group, read_image)

    def _sent(self, consume: Consume | None) -> bool:
        is_sent = bool(self._process_group.broadcast(consume is not None))
        if is_sent:
            self._send(consume)
        return is_sent
