"""The program that the training tests run on each GPU of this machine, one rank per GPU.

python -m torch.distributed.run --standalone --nproc-per-node NUM_GPUS on_gpus.py MODEL OUT VARIANT...
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
import train_on_ranks

from osworld_pipeline.training.distributed import process_group
from osworld_pipeline.training.distributed.process_group import ProcessGroup, open_process_group


class OneOfOne(ProcessGroup):
    """A single rank that still shards its model and uses NCCL."""

    @property
    def is_alone(self) -> bool:
        return False


@contextmanager
def nccl_group() -> Iterator[ProcessGroup]:
    with open_process_group() as ranks:
        if not ranks.is_alone:
            yield ranks
            return
        store = process_group._join(0, 1, ranks.device)
        try:
            yield OneOfOne(rank=0, world_size=1, device=ranks.device, store=store)
        finally:
            dist.destroy_process_group()


if __name__ == "__main__":
    model, out, *variants = sys.argv[1:]
    with nccl_group() as ranks:
        for variant in variants:
            train_on_ranks.train(ranks, Path(model), Path(out) / variant, variant)
