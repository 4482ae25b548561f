"""Ranks and their messages to each other: the death of one rank is one clear error."""

import torch
from torch._C._distributed_c10d import HashStore

from osworld_pipeline.training.distributed.process_group import ProcessGroup, open_process_group


def test_one_process_needs_no_process_group():
    with open_process_group({}) as process_group:
        assert (process_group.rank, process_group.world_size, process_group.is_main, process_group.is_alone) == (
            0,
            1,
            True,
            True,
        )
        assert process_group.broadcast("word") == "word"
        assert process_group.gather(3) == [3]
        assert process_group.sum(2.5) == 2.5
        assert not torch.distributed.is_initialized()


def test_torchrun_with_one_process_gives_a_group_of_one():
    with open_process_group({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}) as process_group:
        assert process_group.is_alone


def test_a_failed_rank_leaves_its_error_for_the_ranks_that_lose_it():
    store = HashStore()
    first, second = (
        ProcessGroup(rank=rank, world_size=2, device=torch.device("cpu"), store=store) for rank in range(2)
    )
    gone = RuntimeError("Connection closed by peer")
    assert first.is_lost(gone)
    assert first.explain(gone, "an update").startswith("rank 0 of 2 lost another rank in an update (Connection closed")
    second.report_error("the disk of rank 1 is full")
    assert first.explain(gone, "an update") == "rank 1 of 2 failed: the disk of rank 1 is full"
    assert not first.is_lost(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


def test_commands_of_one_trainer_are_not_read_as_those_of_the_next():
    store = HashStore()
    first, second = (
        ProcessGroup(rank=rank, world_size=2, device=torch.device("cpu"), store=store) for rank in range(2)
    )
    for name in ("update", "close", "save", "close"):
        first.send_command(name)
    assert [second.next_command() for _ in range(4)] == ["update", "close", "save", "close"]
