"""An event loop with simulated time: where real code would wait, the clock jumps to the end of the wait.

`virtual_time` replaces `time.monotonic` in given modules by the loop's clock.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any, TypeVar

Result = TypeVar("Result")


class NothingWillHappenError(Exception):
    """All tasks wait, and no timer is pending."""


class _JumpingSelector:
    """Never waits: it passes the waiting time to the clock."""

    def __init__(self, selector: selectors.BaseSelector, jump: Callable[[float], None]) -> None:
        self._selector, self._jump = selector, jump

    def __getattr__(self, name: str) -> Any:
        return getattr(self._selector, name)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise NothingWillHappenError("all tasks of the simulation wait, and no timer is pending")
        if timeout > 0:
            self._jump(timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its time starts at 0 s. For code without threads, sockets and processes."""

    def __init__(self) -> None:
        self._now_s = 0.0
        super().__init__()
        self._selector = _JumpingSelector(self._selector, self._advance)  # pyright: ignore

    def time(self) -> float:
        return self._now_s

    def _advance(self, seconds: float) -> None:
        self._now_s += seconds


@contextmanager
def virtual_time(loop: asyncio.AbstractEventLoop, *modules: ModuleType) -> Iterator[None]:
    """During the block, `time.monotonic()` in these modules is the loop's clock."""
    real = [module.time for module in modules]
    for module in modules:
        module.time = SimpleNamespace(monotonic=loop.time)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        for module, clock in zip(modules, real, strict=True):
            module.time = clock  # pyright: ignore[reportAttributeAccessIssue]


def run_in_virtual_time(main: Callable[[], Coroutine[Any, Any, Result]], *modules: ModuleType) -> Result:
    """Run `main` and return its result. Raises NothingWillHappenError if it can never end."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner, virtual_time(runner.get_loop(), *modules):
        return runner.run(main())
