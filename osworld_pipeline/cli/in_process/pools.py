"""Waiting for slots in Dagster's pools. Dagster waits inside a run, without output on the terminal, and ignores SIGINT.
So a run in this process waits before it starts, and reports which run holds the slot."""

import ctypes
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import dagster as dg
from dagster._utils.interrupts import check_captured_interrupt, pop_captured_interrupt

from osworld_pipeline.domain.shown_commands import pipeline_line
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import PipelineError

WAIT_LIMIT_S = 24 * 3600.0
POLL_S = 2.0
ENDED_S = 15.0
"""A cancelled run may still be stopping its programs; its slot is free after this time, as in dagster.yaml
(free_slots_after_run_end_seconds)."""
PENDING_SIGINT_S = 3.0
"""A step handles SIGINT at once; only Dagster's own waiting leaves it pending for longer."""


def pools_of(job: dg.JobDefinition) -> set[str]:
    return {node.pool for node in job.all_node_defs if isinstance(node, dg.OpDefinition) and node.pool}


def wait_for_pools(
    instance: dg.DagsterInstance,
    pools: Iterable[str],
    *,
    state: StateDir,
    say: Callable[[str], None],
    limit_s: float = WAIT_LIMIT_S,
    poll_s: float = POLL_S,
) -> None:
    """Returns when none of `pools` is full. `state`: that of the instance. `say` is called with the reason of the wait
    each time it changes, and with an empty text at the end.

    Raises:
        PipelineError: one is still full after `limit_s`.
    """
    names, reported = sorted(pools), ""
    until = time.monotonic() + limit_s
    while reason := _why_to_wait(instance, names):
        if reason != reported:
            say(f"waiting until {reason}; Ctrl-C ends the wait")
            reported = reason
        if time.monotonic() >= until:
            dagster = pipeline_line(state, "dev")
            raise PipelineError(
                f"no free slot after {limit_s / 3600:.3g} h of waiting until {reason}: terminate that run in Dagster, "
                f"or start Dagster ({dagster}), which ends runs whose process is dead"
            )
        time.sleep(poll_s)
    if reported:
        say("")


def _why_to_wait(instance: dg.DagsterInstance, pools: Iterable[str]) -> str:
    """Why to wait; empty if every pool has a free slot. Frees the slots of ended runs, because without a daemon nothing
    else does."""
    storage = instance.event_log_storage
    known = {pool.name for pool in storage.get_pool_limits()}
    for pool in pools:
        if pool not in known:
            continue  # no run has used it yet
        info = storage.get_concurrency_info(pool)
        if info.limit is None or info.active_slot_count < info.limit:
            continue
        records = {run_id: instance.get_run_record_by_id(run_id) for run_id in sorted(info.active_run_ids)}
        ended = [run_id for run_id, record in records.items() if _has_ended(record)]
        for run_id in ended:
            storage.free_concurrency_slots_for_run(run_id)
        if not ended:
            named = ", ".join(
                f"run {run_id[:8]} ({one.dagster_run.job_name})" for run_id, one in records.items() if one
            )
            return f"a slot of the pool '{pool}' is free; {named} holds it"
    return ""


def _has_ended(record: dg.RunRecord | None) -> bool:
    """None: its run was deleted."""
    if record is None:
        return True
    return record.dagster_run.is_finished and time.time() - (record.end_time or 0.0) >= ENDED_S


@contextmanager
def handled_interrupts() -> Iterator[None]:
    """In this block, SIGINT also ends Dagster's own waiting for a pool: KeyboardInterrupt is raised in the thread that
    entered the block, and the run is cancelled."""
    thread_id, is_over = threading.get_ident(), threading.Event()

    def watch() -> None:
        unheard_since: float | None = None
        while not is_over.wait(0.5):
            if not check_captured_interrupt():
                unheard_since = None
            elif unheard_since is None:
                unheard_since = time.monotonic()
            elif time.monotonic() - unheard_since >= PENDING_SIGINT_S:
                pop_captured_interrupt()  # handled: it must not interrupt the clean-up as well
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(thread_id), ctypes.py_object(KeyboardInterrupt)
                )
                return

    watcher = threading.Thread(target=watch, name="interrupts", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        is_over.set()
        watcher.join()
