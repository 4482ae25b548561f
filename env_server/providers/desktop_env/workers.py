"""Processes of desktop-env's Python: a launcher that has loaded it once, and workers that it forks, one per replica or
grading. A worker answers one call at a time, each within a limit; one that does not answer is killed with its
children."""

import asyncio
import contextlib
import itertools
import os
import select
import shutil
import signal
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from env_server.providers.desktop_env.install import DesktopEnvInstall
from env_server.providers.desktop_env.worker.frames import HEADER, pack, unpack_header
from env_server.providers.desktop_env.worker.processes import kill_below
from env_server.providers.desktop_env.worker.serving import CLOSE_LIMIT_S
from env_server.providers.kinds import environment_for_programs
from env_server.providers.stderr_tail import StderrTail
from osworld_pipeline.errors import DependencyError, EvaluatorError, PipelineError, ReplicaError, SetupError

LOAD_LIMIT_S = 120.0
"""Limit until a started worker answers; the first one waits until desktop-env is loaded."""
KILL_LIMIT_S = 5.0
_PARENT = Path(__file__).resolve().parent
_START = f"import sys; sys.path.append({str(_PARENT)!r}); from worker.launcher import main; main()"
FAULTS: Mapping[str, type[PipelineError]] = {
    "setup": SetupError,
    "evaluator": EvaluatorError,
    "excess": EvaluatorError,
}
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""A fork copies only the calling thread, so the launcher must have no others."""


class WorkerSilentError(ReplicaError):
    """A call was not answered within its limit, and the worker is abandoned."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    fields: Mapping[str, Any]
    blob: bytes


class Worker:
    """`name` is used in messages."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, name: str, pid: int, folder: Path
    ) -> None:
        self.name, self.pid, self.folder = name, pid, folder
        self._reader, self._writer = reader, writer
        # By descriptor, because the process is the launcher's child and its id may be reused.
        self._process_fd = os.pidfd_open(pid)
        self._numbers = itertools.count(1)
        self._lock = asyncio.Lock()
        self._lost: str | None = None
        self._stopping: asyncio.Task[None] | None = None

    def is_alive(self) -> bool:
        return self._lost is None and not self._is_gone()

    async def call(self, call: str, /, *, limit_s: float, blob: bytes = b"", **arguments: Any) -> Answer:
        """A cancelled call runs to its end; the next call waits for it.

        Raises:
            SetupError, EvaluatorError: reported by the worker.
            ReplicaError: the desktop or the worker is gone, or the worker reported any other error.
            WorkerSilentError: it did not answer in time.
        """
        exchange = asyncio.ensure_future(self._exchange(call, arguments, blob, limit_s))
        try:
            answer = await asyncio.shield(exchange)
        except asyncio.CancelledError:
            exchange.add_done_callback(lambda task: task.cancelled() or task.exception())
            raise
        if "fault" in answer.fields:
            raise FAULTS.get(answer.fields["fault"], ReplicaError)(f"desktop-env: {answer.fields['error']}")
        return Answer(fields=answer.fields["ok"], blob=answer.blob)

    async def stop(self) -> None:
        """Releases its VM if possible, and leaves no process and no folder. Idempotent, and safe under cancellation."""
        self._lost = self._lost or f"the worker of {self.name} is stopped"
        if self._stopping is None:
            self._stopping = asyncio.ensure_future(self._stop())
        await asyncio.shield(self._stopping)

    async def _exchange(self, call: str, arguments: Mapping[str, Any], blob: bytes, limit_s: float) -> Answer:
        async with self._lock:
            if self._lost is not None:
                raise ReplicaError(f"{self._lost}; replace the replica")
            number = next(self._numbers)
            try:
                async with asyncio.timeout(limit_s):
                    self._writer.write(pack({"id": number, "call": call, "arguments": dict(arguments)}, blob))
                    await self._writer.drain()
                    answer = await receive(self._reader)
            except TimeoutError as error:
                self._lost = f"the worker of {self.name} did not answer {call!r} within {limit_s:g} s"
                raise WorkerSilentError(f"{self._lost}; replace the replica") from error
            except (asyncio.IncompleteReadError, OSError, ValueError) as error:
                self._lost = f"the worker of {self.name} died during {call!r}"
                raise ReplicaError(f"{self._lost}; replace the replica") from error
            assert answer.fields["id"] == number, "one call at a time"
            return answer

    async def _stop(self) -> None:
        try:
            self._signal(signal.SIGTERM)
            if not await self._wait_gone(CLOSE_LIMIT_S + 2.0):
                await asyncio.to_thread(kill_below, self.pid)
                self._signal(signal.SIGKILL)
                if not await self._wait_gone(KILL_LIMIT_S):
                    raise ReplicaError(f"the worker of {self.name} is still running {KILL_LIMIT_S:g} s after SIGKILL")
        finally:
            self._writer.close()
            await asyncio.to_thread(shutil.rmtree, self.folder, ignore_errors=True)
        os.close(self._process_fd)
        self._process_fd = -1

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._process_fd, number)

    def _is_gone(self) -> bool:
        if self._process_fd < 0:
            return True
        poll = select.poll()
        poll.register(self._process_fd, select.POLLIN)
        return bool(poll.poll(0))

    async def _wait_gone(self, limit_s: float) -> bool:
        gone, loop = asyncio.Event(), asyncio.get_running_loop()
        loop.add_reader(self._process_fd, gone.set)
        try:
            async with asyncio.timeout(limit_s):
                await gone.wait()
            return True
        except TimeoutError:
            return self._is_gone()
        finally:
            loop.remove_reader(self._process_fd)


async def receive(reader: asyncio.StreamReader) -> Answer:
    """IncompleteReadError if the other side is gone."""
    import orjson

    num_json, num_blob = unpack_header(await reader.readexactly(HEADER.size))
    return Answer(fields=orjson.loads(await reader.readexactly(num_json)), blob=await reader.readexactly(num_blob))


class Launcher:
    """Starts with the first worker, and again after it has died; `folder` is where its workers run."""

    def __init__(self, install: DesktopEnvInstall, *, folder: Path) -> None:
        self._install, self._folder = install, folder.absolute()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._stderr_tail = StderrTail()
        self._workers: set[Worker] = set()
        self._is_closed = False

    def start(self) -> None:
        """Starts loading desktop-env if it is not started yet, so that the first worker is ready sooner.

        Raises:
            DependencyError: it cannot be started.
            ReplicaError: the launcher has been closed.
        """
        if self._is_closed:
            raise ReplicaError("desktop-env's workers are shut down with the env server")
        if self._process is not None and self._process.poll() is None:
            return
        self._release()
        self._control, theirs = socket.socketpair()
        search_path = [str(path) for path in self._install.search_path]
        command = [str(self._install.python), "-Ic", _START, str(theirs.fileno()), str(os.getpid()), *search_path]
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with self._stderr_tail.capture() as stderr:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=stderr,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                    cwd=self._folder,
                    env={**environment_for_programs(), **ONE_THREAD},
                )
        except OSError as error:
            raise DependencyError(f"cannot start {self._install.python} in {self._folder} ({error})") from error
        finally:
            theirs.close()

    async def start_worker(self, name: str) -> Worker:
        """
        Raises:
            DependencyError: desktop-env cannot be loaded.
            ReplicaError: the worker did not start.
        """
        self.start()
        assert self._control is not None, "created by start"
        ours, theirs = socket.socketpair()
        try:
            socket.send_fds(self._control, [b"w"], [theirs.fileno()])
        except OSError as error:
            ours.close()
            raise self._unloadable() from error
        finally:
            theirs.close()
        reader, writer = await asyncio.open_connection(sock=ours)
        try:
            async with asyncio.timeout(LOAD_LIMIT_S):
                hello = (await receive(reader)).fields
            worker = Worker(reader, writer, name=name, pid=hello["pid"], folder=Path(hello["folder"]))
        except TimeoutError as error:
            writer.close()
            raise ReplicaError(
                f"desktop-env was not loaded within {LOAD_LIMIT_S:g} s; check the load of the machine"
            ) from error
        except (asyncio.IncompleteReadError, OSError) as error:
            writer.close()
            raise self._unloadable() from error
        except BaseException:
            writer.close()  # ends the worker
            raise
        self._workers.add(worker)
        if self._is_closed:
            await self.stop_worker(worker)
            raise ReplicaError("desktop-env's workers are shut down with the env server")
        return worker

    async def stop_worker(self, worker: Worker) -> None:
        """Idempotent."""
        try:
            await worker.stop()
        finally:
            self._workers.discard(worker)

    async def close(self) -> None:
        """Stops every worker, then the launcher. Idempotent."""
        self._is_closed = True
        results = await asyncio.gather(*map(self.stop_worker, list(self._workers)), return_exceptions=True)
        process = self._process
        if self._control is not None:
            self._control.close()
        if process is not None:
            process.terminate()
            try:
                await asyncio.to_thread(process.wait, KILL_LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                await asyncio.to_thread(process.wait, KILL_LIMIT_S)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    def _release(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None

    def _unloadable(self) -> PipelineError:
        complaint = self._stderr_tail.lines
        last = f"its output: {complaint[-1][:300]}" if complaint else "it printed nothing"
        return DependencyError(f"the desktop-env of {self._install.python} does not load; {last}")
