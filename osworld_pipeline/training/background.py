"""Work that goes on in a thread while training does: at most one piece at a time, and no error is lost."""

import threading
from collections.abc import Callable

from osworld_pipeline.errors import StoreError

WAIT_LIMIT_S = 2 * 3600.0
"""How long a checkpoint may take to be written, behind all that is waited for."""


class Background:
    """One thread at a time. Its error is raised once, by whichever of `check`, `wait` and `start` comes first."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Waits for the work before it."""
        self.wait()

        def run() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - raised where the trainer is called next
                self._error = error

        # A daemon: a program that fails must end, and what it leaves half-written is removed by the next.
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
        """Until the work is done.

        Raises:
            StoreError: it takes longer than two hours.
            BaseException: what the work raised.
        """
        if self._thread is not None:
            self._thread.join(WAIT_LIMIT_S)
            if self._thread.is_alive():
                raise StoreError(f"{self._name} did not end within {WAIT_LIMIT_S:.0f} s: see whether its disk answers")
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error
