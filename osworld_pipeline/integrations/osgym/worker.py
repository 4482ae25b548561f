"""The process of one environment, and the parent's handle to it.

The parent sends reset, step or close; the child answers the first two with a state or a fault. If the parent dies, the
child reads the end of its pipe, closes its environment and exits.
"""

import contextlib
import multiprocessing
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any, Protocol

from osworld_pipeline.errors import PipelineError

CONTEXT = multiprocessing.get_context("forkserver")
"""Fork is excluded because the parent has torch's threads, and spawn because it would load Python for each
environment."""
CONTEXT.set_forkserver_preload(["__main__", __name__])


class Environment(Protocol):
    """The interface of an instance of OSGym's env class. `env_ret` holds `obs` (and after a step `action`, `reward`,
    `done`); `meta_info` holds the episode's `uid`. `close()` is called if it exists."""

    def reset(self) -> tuple[dict[str, Any], Mapping[str, Any]]: ...

    def step(self, action: str) -> tuple[dict[str, Any], Mapping[str, Any]]: ...


EnvClass = Callable[[Any, int], Environment]
"""Called with an environment's config and the worker's id. Another process imports it by name, so no lambda."""


@dataclass(frozen=True, kw_only=True)
class State:
    env_ret: dict[str, Any]
    meta_info: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """The episode is lost; there is no reward."""

    sentence: str


class EnvProcess:
    """A started process. `close` ends it."""

    def __init__(self, env_class: EnvClass, env_config: Any, worker_id: int) -> None:
        self.connection, theirs = CONTEXT.Pipe()
        self._process = CONTEXT.Process(
            target=serve_environment, args=(theirs, env_class, env_config, worker_id), name=f"env-{worker_id}"
        )
        self._process.daemon = True
        try:
            self._process.start()
        except BaseException:
            self.connection.close()
            raise
        finally:
            theirs.close()

    @property
    def sentinel(self) -> int:
        """Ready, for `multiprocessing.connection.wait`, when the process has ended."""
        return self._process.sentinel

    @property
    def pid(self) -> int | None:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    @property
    def ending(self) -> str:
        """How it ended; waits briefly, because its pipe may close first."""
        self._process.join(1.0)
        return f"its process ended with status {self._process.exitcode}"

    def ask(self, order: str, action: str = "") -> bool:
        """Returns False if the child has ended."""
        try:
            self.connection.send((order, action))
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    def receive(self) -> State | Fault | None:
        """Its message; None if there is none, or no more will come."""
        try:
            return self.connection.recv() if self.connection.poll() else None
        except (EOFError, ConnectionResetError):
            return None


def close_processes(processes: Sequence[EnvProcess], *, grace_s: float) -> None:
    """Ends all of them and returns when they have ended: with a close order, then SIGTERM, then SIGKILL."""
    for process in processes:
        process.ask("close")
    for end in (None, "terminate", "kill"):
        deadline = time.monotonic() + grace_s
        for process in processes:
            if end is not None and process.is_alive:
                getattr(process._process, end)()
        for process in processes:
            process._process.join(max(0.0, deadline - time.monotonic()))
        if not any(process.is_alive for process in processes):
            break
    for process in processes:
        process.connection.close()
        if not process.is_alive:
            process._process.close()


def serve_environment(connection: Connection, env_class: EnvClass, env_config: Any, worker_id: int) -> None:
    """The main function of the child."""
    # Ctrl-C is handled by the parent; SIGTERM still closes the environment.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _end)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError, EOFError):
        _serve(connection, env_class, env_config, worker_id)


def _serve(connection: Connection, env_class: EnvClass, env_config: Any, worker_id: int) -> None:
    env: Environment | None = None
    try:
        while True:
            order, action = connection.recv()
            if order == "close":
                return
            try:
                if env is None:
                    env = env_class(env_config, worker_id)
                env_ret, meta_info = env.reset() if order == "reset" else env.step(action)
                answer: State | Fault = State(env_ret=env_ret, meta_info=meta_info)
            except PipelineError as error:
                answer = Fault(sentence=str(error) or type(error).__name__)
            except Exception as error:  # noqa: BLE001 - a bug of a user's env class must not hang the parent
                traceback.print_exc(file=sys.stderr)
                answer = Fault(sentence=f"{type(error).__name__}: {error}")
            connection.send(answer)
    finally:
        close = getattr(env, "close", None)
        if close is not None:
            close()


def _end(_number: int, _frame: FrameType | None) -> None:
    raise SystemExit(0)
