"""An event loop whose time is simulated: where real code would wait, the clock jumps to when it would go on.

Code that asks `time.monotonic` is shown the loop's clock by `virtual_time`; nothing else of it changes.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any, TypeVar

Result = TypeVar("Result")


class NothingWillHappenError(Exception):
    """Everything waits, and for nothing that has a time."""


class _JumpingSelector:
    """Never waits: it hands the waiting time to the clock."""

    def __init__(self, selector: selectors.BaseSelector, jump: Callable[[float], None]) -> None:
        self._selector, self._jump = selector, jump

    def __getattr__(self, name: str) -> Any:
        return getattr(self._selector, name)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise NothingWillHappenError("the simulation waits, and nothing is going to happen")
        if timeout > 0:
            self._jump(timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Begins at 0 s. For code without threads, sockets and processes."""

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
    """While the block lasts, `time.monotonic()` in these modules is the loop's clock."""
    real = [module.time for module in modules]
    for module in modules:
        module.time = SimpleNamespace(monotonic=loop.time)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        for module, clock in zip(modules, real, strict=True):
            module.time = clock  # pyright: ignore[reportAttributeAccessIssue]


def run_in_virtual_time(main: Callable[[], Coroutine[Any, Any, Result]], *modules: ModuleType) -> Result:
    """What `main` returns. Raises NothingWillHappenError where it can never end."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner, virtual_time(runner.get_loop(), *modules):
        return runner.run(main())
