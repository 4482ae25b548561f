"""A disk that fills up at any moment of a checkpoint's writing is reported with one sentence, and no file is left."""

from pathlib import Path

import pytest
import torch
from chaos import fill_up, small_disk

from osworld_pipeline.errors import StoreError
from osworld_pipeline.training.weights.checkpoint import save_optimizer, writing_folder

STATE = {f"w{index}": torch.zeros(40_000) for index in range(8)}
STATE_BYTES = 8 * 40_000 * 4


def test_a_disk_that_fills_up_while_the_optimiser_is_saved_is_named(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with small_disk(disk) as is_mounted:
        if not is_mounted:
            pytest.skip("mounting a small disk is not allowed here")
        for share in range(1, 20, 3):
            ballast = fill_up(disk, spare_bytes=STATE_BYTES * share // 20)
            with (
                pytest.raises(StoreError, match=r"no disk space left to write .*update-1: free some space"),
                writing_folder(disk / "update-1") as folder,
            ):
                save_optimizer(folder, STATE)
            ballast.unlink()
            assert list(disk.iterdir()) == []
        with writing_folder(disk / "update-1") as folder:
            save_optimizer(folder, STATE)
