"""The record of a training stage: every update once, whenever its program is killed and however fast updates are."""

import os
from pathlib import Path
from typing import Any

import pytest

from osworld_pipeline.domain.stage_record import TrainingStage
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import StoreError, TrainingError
from osworld_pipeline.runs.stage_log import StageLog, stage_log
from osworld_pipeline.store import TrajectoryStore
from osworld_pipeline.store.compaction import compact_parts
from osworld_pipeline.tables.catalog import fresh_views

STAGE = TrainingStage(stage_key="sft-1", stage="sft", parent_id="base-1", num_planned=30, run_ids={"mlflow": "m"})


class Killed(BaseException):
    pass


@pytest.fixture
def store(tmp_path: Path) -> TrajectoryStore:
    return TrajectoryStore(StateDir(tmp_path))


def ask(store: TrajectoryStore, sql: str) -> list[tuple[Any, ...]]:
    with fresh_views(StateDir(store.root.parent)) as connection:
        return connection.execute(sql).fetchall()


def train(log: StageLog, updates: range, *, save_every: int = 5) -> None:
    for update in updates:
        log.add(update, {"loss": 1 / update}, started_at=100.0 + update)
        if update % save_every == 0:
            log.flush()


UPDATES = 'SELECT "update", loss FROM updates ORDER BY ALL'


def test_fast_updates_are_written_together_and_slow_ones_at_once(store: TrajectoryStore) -> None:
    with stage_log(store, STAGE, num_updates=0, gather_s=60) as log:
        log.add(1, {"loss": 1.0}, started_at=1.0)
        assert ask(store, UPDATES) == [(1, 1.0)], "the first is seen at once"
        train(log, range(2, 31), save_every=10)
    assert ask(store, UPDATES) == [(update, 1 / update) for update in range(1, 31)]
    assert len(store.existing_parts("updates")) == 4
    with stage_log(store, STAGE, num_updates=0) as log:
        for update in (1, 2, 3):
            log.add(update, {"loss": 2.0}, started_at=1.0)
            assert ask(store, UPDATES)[-1] == (update, 2.0)


@pytest.mark.parametrize("is_compacted", [False, True])
@pytest.mark.parametrize("num_done", [0, 5, 10])
def test_a_resumed_stage_removes_updates_that_it_repeats_even_if_they_were_written_with_others(
    store: TrajectoryStore, num_done: int, is_compacted: bool
) -> None:
    def first_attempt() -> None:
        with stage_log(store, STAGE, num_updates=0, gather_s=60) as log:
            train(log, range(1, 14))
            raise Killed

    with pytest.raises(Killed):
        first_attempt()
    if is_compacted:
        compact_parts(store.root, min_parts=1, retired_grace_s=0)
    with stage_log(store, STAGE, num_updates=num_done, gather_s=0) as log:
        assert ask(store, UPDATES) == [(update, 1 / update) for update in range(1, num_done + 1)]
        train(log, range(num_done + 1, 31))
    assert ask(store, UPDATES) == [(update, 1 / update) for update in range(1, 31)]


def test_an_update_that_is_written_again_is_replaced(store: TrajectoryStore) -> None:
    """A held try, and then the update itself."""
    with stage_log(store, STAGE, num_updates=0) as log:
        log.add(1, {"is_held": 1.0, "is_held_by_faults": 1.0, "num_held_tries": 1.0}, started_at=1.0)
        log.add(1, {"is_held": 0.0, "is_held_by_faults": 0.0, "num_held_tries": 1.0, "loss": 0.5}, started_at=1.0)
    assert ask(store, "SELECT is_held, held_reason, num_held_tries, loss, weights_id, run_ids FROM updates") == [
        (False, None, 1, 0.5, "sft-1-u0001", {"mlflow": "m"})
    ]


STATUS = "SELECT status, num_updates, num_planned, num_attempts, error, ended_utc IS NULL, process_id FROM stages"


def test_the_status_of_a_stage_is_recorded_from_its_start_to_its_end(store: TrajectoryStore) -> None:
    with stage_log(store, STAGE, num_updates=0) as log:
        assert ask(store, STATUS) == [("running", 0, 30, 1, None, True, os.getpid())]
        log.add(1, {}, started_at=1.0)
        assert ask(store, STATUS)[0][:2] == ("running", 1)
        log.stop("retraining.max_episodes is spent")
    assert ask(store, STATUS) == [("stopped", 1, 30, 1, "retraining.max_episodes is spent", False, os.getpid())]
    with pytest.raises(TrainingError), stage_log(store, STAGE, num_updates=1):
        raise TrainingError("the loss is nan")
    assert ask(store, STATUS)[0][:5] == ("failed", 1, 30, 2, "TrainingError: the loss is nan")
    with pytest.raises(Killed), stage_log(store, STAGE, num_updates=1):
        raise Killed
    assert ask(store, STATUS)[0][:5] == ("stopped", 1, 30, 3, "it received a signal to stop")


def test_the_error_that_ended_a_stage_is_raised_even_if_its_record_cannot_be_written(store: TrajectoryStore) -> None:
    class Full(TrajectoryStore):
        def write_updates(self, part: str, updates: Any) -> None:
            raise StoreError("no space is left")

    def attempt() -> None:
        with stage_log(Full(StateDir(store.root.parent)), STAGE, num_updates=0, gather_s=60) as log:
            log.flush()
            log.add(1, {}, started_at=1.0)
            raise TrainingError("the loss is nan")

    with pytest.raises(TrainingError, match="the loss is nan"):
        attempt()
