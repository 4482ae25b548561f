"""What the tests of two ranks run on each rank, all in one process because starting one takes longer than the rest.

python -m torch.distributed.run --standalone --nproc-per-node 2 on_two_ranks.py TINY_MODEL LARGE_MODEL OUT VARIANT...
"""

import sys
from pathlib import Path

import load_on_ranks
import share_on_ranks
import torch
import train_on_ranks

from osworld_pipeline.atomic_io import write_file
from osworld_pipeline.training.distributed.process_group import open_process_group

DONE = "done"
"""Written when everything is, but the training without an end."""


def main(tiny: Path, large: Path, out: Path, variants: list[str]) -> None:
    torch.set_num_threads(1)
    with open_process_group() as ranks:
        # This runs first, because it measures what the process holds.
        load_on_ranks.load(ranks, large, out / "loaded.json")
        share_on_ranks.share(ranks, tiny, out / "shared.json")
        for variant in variants:
            train_on_ranks.train(ranks, tiny, out / variant, variant)
        if ranks.is_main:
            write_file(out / DONE, b"")
        train_on_ranks.train_endlessly(ranks, tiny, out / "endless")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]), sys.argv[4:])
