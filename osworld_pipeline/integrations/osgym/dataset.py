"""The data engine as a torch IterableDataset: a policy acts in the environments, and the dataset yields batches of
recorded steps."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from osworld_pipeline.integrations.osgym.batches import Batch
from osworld_pipeline.integrations.osgym.dataloader import MultiTurnDataloader

Policy = Callable[[Batch], Mapping[str, Any]]
"""Answers a batch of prompts with the input of `MultiTurnDataloader.async_step`."""


class MultiTurnDataset(IterableDataset[Batch]):
    """Yields whole batches: pass it to `torch.utils.data.DataLoader` with `batch_size=None`. The caller closes the
    dataloader."""

    def __init__(
        self,
        dataloader: MultiTurnDataloader,
        policy: Policy,
        *,
        num_batches: int,
        rounds_per_batch: int = 1,
        batch_size: int | None = None,
    ) -> None:
        """Before each batch the policy answers `rounds_per_batch` batches of prompts, and more until there are enough
        steps of finished episodes. `batch_size`: recorded steps per batch; None for the dataloader's."""
        super().__init__()
        self._dataloader, self._policy = dataloader, policy
        self._num_batches, self._rounds = num_batches, rounds_per_batch
        self._batch_size = batch_size or dataloader.batch_size

    def __len__(self) -> int:
        return self._num_batches

    def __iter__(self) -> Iterator[Batch]:
        """
        Raises:
            ValueError: called in a worker process of torch; the environments have their own processes.
            EnvServerError: environments fail, or do not answer.
        """
        if get_worker_info() is not None:
            raise ValueError("the environments have their own processes: use the DataLoader with num_workers=0")
        for _ in range(self._num_batches):
            num_rounds = 0
            while num_rounds < self._rounds or len(self._dataloader.replay) < self._batch_size:
                self._dataloader.async_step(self._policy(next(self._dataloader)))
                num_rounds += 1
            yield self._dataloader.sample_from_buffer(self._batch_size)
