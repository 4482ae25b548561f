"""Reduces the cost of garbage collection in short processes. With torch, Dagster or MLflow loaded, the collections
during the imports and those of the interpreter's teardown take one to two seconds of a core, and free nothing that the
end of the process does not free."""

import atexit
import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

FLUSH_FAILED = 120
"""The exit status that Python itself uses if output cannot be flushed at exit."""
_SELDOM = 50_000
"""New containers before a collection of the youngest generation, instead of 700."""


def run_process(main: Callable[[], int | None]) -> NoReturn:
    """Runs the program and ends the process with its status, once threads have ended and exit handlers have run, but
    without the teardown of the interpreter. To be called before anything registers an exit handler. An exception that
    `main` raises ends the process as usual."""
    status = 1

    def end() -> None:
        # Handlers run in reverse, so this is the last one.
        os._exit(status if _is_flushed() else FLUSH_FAILED)

    atexit.register(end)
    try:
        status = main() or 0
    except SystemExit as asked:
        status = _status_of(asked.code)
        raise
    except BaseException:
        atexit.unregister(end)
        raise
    sys.exit(status)


def collect_seldom() -> None:
    """For a process without large arrays: collects less often, so it keeps more garbage for a while."""
    gc.set_threshold(_SELDOM, *gc.get_threshold()[1:])


@contextmanager
def imports_without_collection() -> Iterator[None]:
    """For a process that may hold large arrays later: no collection during its imports, the usual ones afterwards."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _status_of(code: object) -> int:
    """The exit status for the argument of `sys.exit`. For a string it is 1; the interpreter prints the string."""
    if code is None:
        return 0
    return code & 0xFF if isinstance(code, int) else 1


def _is_flushed() -> bool:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            return False
    return True
