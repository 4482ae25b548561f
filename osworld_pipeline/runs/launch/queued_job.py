"""The entrypoint of a job of a queue: runs one program and reports to its launcher through a mailbox in the state
folder. It ends when the launcher requests it or has died.

Exit status as `osworld_pipeline.runs`.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from osworld_pipeline.errors import PipelineError
from osworld_pipeline.runs.__main__ import EXIT_FATAL, EXIT_STOPPED, Stopped, program_module, run_program, stop
from osworld_pipeline.runs.launch.mailbox import Mailbox, MessageWriter, remove_orphan, watched_launcher
from osworld_pipeline.runs.messages import Started

RunRanks = Callable[[str, dict[str, Any], Mailbox, int], int]
"""Runs a program (its name, its job, its mailbox, its number of ranks); returns the exit status."""


def main(argv: list[str]) -> int:
    return run_queued(argv, run_alone)


def run_queued(argv: list[str], run_ranks: RunRanks) -> int:
    """`argv`: program, mailbox folder, number of ranks, seconds of silence after which the launcher counts as dead, log
    file."""
    program, mailbox, num_ranks = argv[0], Mailbox(Path(argv[1])), int(argv[2])
    lost_after_s, log_path = float(argv[3]), Path(argv[4])
    if program_module(program) is None:
        print(f"there is no program {program}", file=sys.stderr)
        return EXIT_FATAL
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
        job = mailbox.take_job()
        _write_to(log_path)
        with watched_launcher(mailbox, lost_after_s=lost_after_s, on_stop=ask, on_lost=give_up):
            return run_ranks(program, job, mailbox, num_ranks)
    except PipelineError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return EXIT_FATAL
    except Stopped:
        return EXIT_STOPPED
    finally:
        if is_lost.is_set():
            remove_orphan(mailbox.folder)


def run_alone(program: str, job: dict[str, Any], mailbox: Mailbox, num_ranks: int) -> int:
    """Runs the program in this process."""
    assert num_ranks == 1, "checked by the launcher"
    writer = MessageWriter(mailbox)
    writer.report(Started())
    return run_program(program, job, writer.report)


def _write_to(log_path: Path) -> None:
    """Redirects the output to the log in the state folder, because a queue may keep it on the machine of the job."""
    log_path.parent.mkdir(parents=True, exist_ok=True)
    log = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
