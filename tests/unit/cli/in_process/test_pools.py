"""A run in this process waits for slots in pools before it starts, and the wait can be interrupted."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest
from dagster._core.test_utils import create_run_for_test

from osworld_pipeline.cli.in_process.pools import PENDING_SIGINT_S, handled_interrupts, pools_of, wait_for_pools
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import PipelineError

STATE = StateDir(Path("/srv/state"))


@dg.op(pool="trainer")
def train() -> None:
    pass


@dg.op
def look() -> None:
    pass


@dg.job
def trains() -> None:
    train()
    look()


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    settings = {"concurrency": {"pools": {"granularity": "op", "default_limit": 1}}}
    with dg.instance_for_test(overrides=settings) as instance:
        instance.event_log_storage.initialize_concurrency_limit_to_default("trainer")
        yield instance


def hold(instance: dg.DagsterInstance, status: dg.DagsterRunStatus = dg.DagsterRunStatus.STARTED) -> str:
    """A run of another program takes the only slot; returns the id of that run."""
    run = create_run_for_test(instance, job_name="retrain", status=status)
    assert instance.event_log_storage.claim_concurrency_slot("trainer", run.run_id, "step").is_claimed
    return run.run_id


def test_pools_of_a_job_are_those_of_its_ops() -> None:
    assert pools_of(trains) == {"trainer"}


def test_nothing_is_printed_if_a_slot_is_free(instance: dg.DagsterInstance) -> None:
    said: list[str] = []
    wait_for_pools(instance, ["trainer", "never-used"], state=STATE, say=said.append)
    assert said == []


def test_a_wait_prints_the_run_that_holds_the_slot_once_and_then_that_it_is_over(instance: dg.DagsterInstance) -> None:
    holder = hold(instance)
    said: list[str] = []
    free = instance.event_log_storage.free_concurrency_slots_for_run
    timer = threading.Timer(0.5, free, [holder])
    timer.start()
    started = time.monotonic()
    wait_for_pools(instance, ["trainer"], state=STATE, say=said.append, poll_s=0.05)
    timer.join()  # it still reads the database when the slot is free
    assert time.monotonic() - started >= 0.4
    assert said == [
        f"waiting until a slot of the pool 'trainer' is free; run {holder[:8]} (retrain) holds it; "
        "Ctrl-C ends the wait",
        "",
    ]


def test_a_wait_ends_at_its_time_limit(instance: dg.DagsterInstance) -> None:
    holder = hold(instance)
    with pytest.raises(
        PipelineError,
        match=rf"no free slot after 0 h of waiting until .* run {holder[:8]} \(retrain\) holds it: terminate",
    ):
        wait_for_pools(instance, ["trainer"], state=STATE, say=lambda _: None, limit_s=0.0)


def test_the_slots_of_an_ended_run_are_freed(instance: dg.DagsterInstance) -> None:
    hold(instance, dg.DagsterRunStatus.FAILURE)
    wait_for_pools(instance, ["trainer"], state=STATE, say=lambda _: None, limit_s=0.0)
    assert instance.event_log_storage.get_concurrency_info("trainer").active_slot_count == 0


def test_control_c_ends_dagsters_own_waiting(instance: dg.DagsterInstance) -> None:
    holder = hold(instance)
    threading.Timer(1.0, os.kill, [os.getpid(), signal.SIGINT]).start()
    started = time.monotonic()
    with handled_interrupts():
        result = trains.execute_in_process(instance=instance, raise_on_error=False)
    assert not result.success
    assert time.monotonic() - started < PENDING_SIGINT_S + 20.0
    assert instance.event_log_storage.get_concurrency_info("trainer").active_run_ids == {holder}


def test_a_run_that_was_just_cancelled_still_holds_its_slots(instance: dg.DagsterInstance) -> None:
    run = instance.get_run_by_id(hold(instance))
    assert run is not None
    instance.report_run_canceled(run)
    with pytest.raises(PipelineError, match=run.run_id[:8]):
        wait_for_pools(instance, ["trainer"], state=STATE, say=lambda _: None, limit_s=0.0)
    assert instance.event_log_storage.get_concurrency_info("trainer").active_run_ids == {run.run_id}
