"""The entrypoint of a job of a queue: runs one program and reports to its launcher through a mailbox in the state
folder. It ends when the launcher requests it or has died.

Exit status as `osworld_pipeline.runs`.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import PipelineError
from osworld_pipeline.programs.short_process import run_process
from osworld_pipeline.runs.__main__ import EXIT_FATAL, EXIT_STOPPED, Stopped, program_module, run_program, stop
from osworld_pipeline.runs.launch.mailbox import Mailbox, MessageWriter, mailbox_folder, remove_orphan, watched_launcher
from osworld_pipeline.runs.messages import Started
from osworld_pipeline.runs.shared_state import SharedState, job_here


@dataclass(frozen=True, kw_only=True)
class QueuedRun:
    """A program, as its job runs it."""

    program: str
    job: dict[str, Any]
    state: StateDir
    """The state folder, at its path on this host."""
    mailbox: Mailbox
    num_ranks: int


RunRanks = Callable[[QueuedRun], int]
"""Returns the exit status."""


def job_arguments(state: StateDir, mailbox: Mailbox, program: str, *, num_ranks: int, lost_after_s: float) -> list[str]:
    """Arguments of this module for a job on another host. `lost_after_s`: seconds of silence after which the launcher
    counts as dead. Raises StoreError."""
    return [program, mailbox.name, str(num_ranks), str(lost_after_s), SharedState.of(state).to_text()]


def main(argv: list[str]) -> int:
    return run_queued(argv, run_alone)


def run_queued(argv: list[str], run_ranks: RunRanks) -> int:
    """`argv`: of `job_arguments`."""
    program, mailbox_name, num_ranks, lost_after_s, shared = argv[0], argv[1], int(argv[2]), float(argv[3]), argv[4]
    if program_module(program) is None:
        print(f"there is no program {program}", file=sys.stderr)
        return EXIT_FATAL
    try:
        state = SharedState.from_text(shared).here()
    except PipelineError as error:
        return _refuse(error)
    mailbox = Mailbox(mailbox_folder(state, mailbox_name))
    signal.signal(signal.SIGTERM, stop)
    is_lost = threading.Event()

    def ask() -> None:
        # Sent to the main thread: a signal to the process may reach this thread, and would not wake the main one.
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

    def give_up() -> None:
        is_lost.set()
        ask()
        # No other process can kill a program that does not unwind.
        timer = threading.Timer(lost_after_s, lambda: os.killpg(0, signal.SIGKILL))
        timer.daemon = True
        timer.start()

    try:
        job = job_here(mailbox.take_job(), state)
        _write_to(state.program_log(program))
        run = QueuedRun(program=program, job=job, state=state, mailbox=mailbox, num_ranks=num_ranks)
        with watched_launcher(mailbox, lost_after_s=lost_after_s, on_stop=ask, on_lost=give_up):
            return run_ranks(run)
    except PipelineError as error:
        return _refuse(error)
    except Stopped:
        return EXIT_STOPPED
    finally:
        if is_lost.is_set():
            remove_orphan(mailbox.folder)


def run_alone(run: QueuedRun) -> int:
    """Runs the program in this process."""
    assert run.num_ranks == 1, "checked by the launcher"
    writer = MessageWriter(run.mailbox)
    writer.report(Started())
    return run_program(run.program, run.job, writer.report)


def _refuse(error: PipelineError) -> int:
    print(f"{type(error).__name__}: {error}", file=sys.stderr)
    return EXIT_FATAL


def _write_to(path: Path) -> None:
    """Redirects the output to the log in the state folder, because a queue may keep it on the machine of the job."""
    path.parent.mkdir(parents=True, exist_ok=True)
    log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


if __name__ == "__main__":
    run_process(partial(main, sys.argv[1:]))
