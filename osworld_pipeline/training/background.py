"""Background work in a thread during training: at most one piece at a time; errors are never lost."""

import threading
from collections.abc import Callable

from osworld_pipeline.errors import StoreError

WAIT_LIMIT_S = 2 * 3600.0
"""Limit for writing a checkpoint, including everything that it waits for."""


class Background:
    """One thread at a time. Its error is raised once, by the first call of `check`, `wait` or `start` afterwards."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Waits for the previous work."""
        self.wait()

        def run() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - raised by the next call of the trainer
                self._error = error

        # A daemon thread: a failed program must end, and the next one removes incomplete files.
        self._thread = threading.Thread(target=run, name=self._name, daemon=True)
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def check(self) -> None:
        """Raises the error of work that has ended; never waits."""
        if not self.is_busy:
            self.wait()

    def wait(self) -> None:
        """Waits until the work is done.

        Raises:
            StoreError: it takes longer than two hours.
            BaseException: the error of the work.
        """
        if self._thread is not None:
            self._thread.join(WAIT_LIMIT_S)
            if self._thread.is_alive():
                raise StoreError(f"{self._name} did not end within {WAIT_LIMIT_S:.0f} s: check that its disk responds")
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error
