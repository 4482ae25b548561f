"""The sandbox in which OSWorld's graders run: bubblewrap without a network, with a read-only view of the system and of
desktop-env's Python. One process in it has loaded desktop-env, and forks a grader for each grading. All input and all
connections of a grader pass through the env server."""

import asyncio
import contextlib
import itertools
import json
import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

from env_server.providers.bubblewrap import SYSTEM_FOLDERS, end_sandbox
from env_server.providers.desktop_env.install import DesktopEnvInstall
from env_server.providers.desktop_env.worker.frames import HEADER, pack, unpack_header
from env_server.providers.desktop_env.workers import FAULTS, LOAD_LIMIT_S, ONE_THREAD
from env_server.providers.host_users import HostUsers
from env_server.providers.requirements import SYSTEM_PATH, try_sandbox
from env_server.providers.stderr_tail import StderrTail
from osworld_pipeline.domain.remedies import how_to_set_up
from osworld_pipeline.errors import DependencyError, EvaluatorError, PipelineError, ReplicaError

DOORS = ("guest", "chromium", "vlc")
"""The endpoints that a grader connects to, as sandboxed.py names them: ports of its loopback, which the env server
serves."""
END_LIMIT_S = 10.0
TRIAL_LIMIT_S = 30.0
MAX_ANSWER_BYTES = 1 << 20
_HERE = Path(__file__).resolve().parents[2]
_OWN_FOLDERS = (_HERE / "providers/desktop_env/worker", _HERE / "guest")
_IMPORT = (
    f"import sys; sys.path += [{str(_OWN_FOLDERS[0].parent)!r}, {str(_OWN_FOLDERS[1])!r}]; from worker import sandboxed"
)
_AS_ROOT = (
    'set -e; uid="$1"; shift; mount -t tmpfs none /mnt; number=0; while [ "$1" != -- ]; do mkdir "/mnt/$number"; '
    'mount --bind "$1" "/mnt/$number"; number=$((number + 1)); shift; done; shift; '
    'exec setpriv --reuid "$uid" --regid "$uid" --clear-groups "$@"'
)
"""Run in a separate mount namespace: mounts the folders where the sandbox's user can reach them, then drops root."""
_SHOWN_OF_ETC = ("ld.so.cache", "alternatives", "fonts", "mime.types", "localtime")
_TMP = "/tmp"  # noqa: S108 - the sandbox's own
_WALLS = (
    "bwrap", "--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts",
    "--unshare-cgroup-try", "--hostname", "grader", "--die-with-parent", "--new-session", "--clearenv",
    "--setenv", "PATH", SYSTEM_PATH, "--setenv", "LANG", "C.UTF-8", "--setenv", "HOME", _TMP,
    *SYSTEM_FOLDERS, "--tmpfs", _TMP, "--chdir", _TMP,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class GraderLimits:
    """Limits of one grading. A grading that exceeds memory or CPU time scores 0, as with our own metrics."""

    memory_bytes: int = 4 << 30
    cpu_s: int = 60
    """Limit of each process. It must be less than a task's time limit for grading, which ends in a fault."""
    num_processes: int = 128
    disk_bytes: int = 1 << 30
    """Held in memory; applies to each of its two file systems and to each file."""


class ExcessError(PipelineError):
    """A grader exceeded its limit of memory or CPU time."""


@dataclass(kw_only=True)
class _Launched:
    process: subprocess.Popen[bytes]
    control: socket.socket
    stderr_tail: StderrTail
    has_loaded: bool = False
    """Whether it has forked a grader."""


class GraderSandbox:
    """Starts with the first grader, and again after it has died."""

    def __init__(self, install: DesktopEnvInstall, limits: GraderLimits | None = None) -> None:
        """
        Raises:
            DependencyError: this machine does not allow a sandbox.
        """
        self._install, self._limits = install, limits or GraderLimits()
        self._launched: _Launched | None = None
        self._is_closed = False
        self._users = HostUsers.open()
        self._uid = self._users.claim()
        try:
            try_sandbox(self._command("try_out"), limit_s=TRIAL_LIMIT_S)
        except DependencyError:
            self._users.release(self._uid)
            raise

    def start(self) -> None:
        """Starts loading desktop-env if it is not started yet, so that the first grader is ready sooner.

        Raises:
            DependencyError: it cannot be started.
            ReplicaError: the sandbox has been closed.
        """
        self._running()

    @asynccontextmanager
    async def grader(self) -> AsyncIterator["SandboxedGrader"]:
        """A process for one grading; it and all processes that it started have ended when the block is left.

        Raises:
            DependencyError: desktop-env cannot be loaded in the sandbox.
            ReplicaError: the grader did not start in time, or the sandbox has been closed.
            EvaluatorError: at the end of the block, a process of the grader does not end.
        """
        launched = self._running()
        try:
            ours, doors = await _open(launched)
        except OSError as error:
            if not launched.has_loaded:
                raise self._unloadable(launched) from error
            await self._end(launched)  # it has died since; another is started, once
            launched = self._running()
            try:
                ours, doors = await _open(launched)
            except OSError as again:
                raise self._unloadable(launched) from again
        try:
            reader, writer = await _stream(ours)
            try:
                yield SandboxedGrader(reader, writer, doors)
            finally:
                await asyncio.shield(asyncio.ensure_future(_end_grader(reader, writer)))
        finally:
            for door in doors.values():
                door.close()

    async def close(self) -> None:
        """Ends the sandbox and every process in it. Idempotent."""
        self._is_closed = True
        if self._launched is not None:
            await self._end(self._launched)
        uid, self._uid = self._uid, None
        self._users.release(uid)

    def _running(self) -> _Launched:
        if self._is_closed:
            raise ReplicaError("the graders' sandbox is shut down with the env server")
        if self._launched is not None:
            if self._launched.process.poll() is None:
                return self._launched
            self._launched.control.close()
            self._launched.stderr_tail.kill_writers()  # a bubblewrap killed during its fork leaves a child
        self._launched = self._launch()
        return self._launched

    def _launch(self) -> _Launched:
        stderr_tail = StderrTail()
        ours, theirs = socket.socketpair()
        try:
            with stderr_tail.capture() as stderr:
                process = subprocess.Popen(
                    self._command("main", str(theirs.fileno())),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=stderr,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                    cwd="/",
                    env={"PATH": SYSTEM_PATH},
                )
        except OSError as error:
            ours.close()
            raise DependencyError(f"cannot start bubblewrap ({error}); run `{how_to_set_up('debian')}`") from error
        finally:
            theirs.close()
        return _Launched(process=process, control=ours, stderr_tail=stderr_tail)

    async def _end(self, launched: _Launched) -> None:
        if self._launched is launched:
            self._launched = None
        launched.control.close()
        await end_sandbox(launched.process, launched.stderr_tail, what="the graders' sandbox")

    def _command(self, function: str, *arguments: str) -> list[str]:
        folders, uid = self._folders(), self._uid
        outer, sources = list[str](), [str(folder) for folder in folders]
        if uid is not None:
            outer = ["unshare", "--mount", "--propagation", "private", "/bin/sh", "-c", _AS_ROOT, "sh", str(uid)]
            outer += [*sources, "--"]
            sources = [f"/mnt/{number}" for number in range(len(folders))]
        shown = [f"/etc/{name}" for name in _SHOWN_OF_ETC]
        binds = [word for path in shown for word in ("--ro-bind-try", path, path)]
        for source, folder in zip(sources, folders, strict=True):
            binds += ["--ro-bind", source, str(folder)]
        variables = [word for name, value in ONE_THREAD.items() for word in ("--setenv", name, value)]
        options = {
            "search_path": [str(path) for path in self._install.search_path],
            "kept": [str(folder) for folder in folders],
            **asdict(self._limits),
        }
        code = f"{_IMPORT}; sandboxed.{function}()"
        python = [str(self._install.python), "-IBc", code, *arguments, json.dumps(options)]
        return [*outer, *_WALLS, *variables, *binds, "--remount-ro", "/dev", "--remount-ro", "/", "--", *python]

    def _folders(self) -> list[Path]:
        """Each folder once, none inside another, and none in /usr."""
        found: list[Path] = []
        for folder in sorted({*self._install.folders, *self._install.search_path, *_OWN_FOLDERS}):
            if not any(folder.is_relative_to(other) for other in (Path("/usr"), *found)):
                found.append(folder)
        return found

    def _unloadable(self, launched: _Launched) -> DependencyError:
        complaint = launched.stderr_tail.lines
        last = f"its output: {complaint[-1][:300]}" if complaint else "it printed nothing"
        return DependencyError(f"the desktop-env of {self._install.python} does not load in a sandbox; {last}")


class SandboxedGrader:
    """`doors` are listening sockets of its loopback, on which the env server accepts connections."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, doors: dict[str, socket.socket]
    ) -> None:
        self.doors = doors
        self._reader, self._writer = reader, writer
        self._numbers = itertools.count(1)

    async def call(self, call: str, /, *, limit_s: float, blob: bytes = b"", **arguments: Any) -> dict[str, Any]:
        """
        Raises:
            ExcessError: it exceeded its limits.
            EvaluatorError: it crashed, died, or did not answer in time.
            ReplicaError: the guest did not answer the grader, or the call failed outside OSWorld's evaluators.
        """
        number = next(self._numbers)
        try:
            async with asyncio.timeout(limit_s):
                self._writer.write(pack({"id": number, "call": call, "arguments": arguments}, blob))
                await self._writer.drain()
        except TimeoutError as error:
            raise EvaluatorError(f"the grader did not read {call!r} within {limit_s:g} s") from error
        except OSError:
            pass  # the answer that says how it ended is read below
        try:
            async with asyncio.timeout(limit_s):
                answer = await _receive_answer(self._reader)
        except TimeoutError as error:
            raise EvaluatorError(f"the grader did not answer {call!r} within {limit_s:g} s") from error
        except (asyncio.IncompleteReadError, OSError, ValueError) as error:
            raise EvaluatorError(f"the grading was interrupted: the grader died during {call!r}") from error
        return _result_of(answer, number)


def _result_of(answer: dict[str, Any], number: int) -> dict[str, Any]:
    end, fault = answer.get("end"), answer.get("fault")
    if end in ("memory", "cpu") or fault == "excess":
        raise ExcessError("memory" if end != "cpu" else "CPU time")
    if end is not None:
        raise EvaluatorError(f"the grading was interrupted: the grader's process ended with {str(end)[:40]}")
    if fault is not None:
        raise FAULTS.get(str(fault), ReplicaError)(f"desktop-env: {str(answer.get('error'))[:2000]}")
    if answer.get("id") != number or not isinstance(answer.get("ok"), dict):
        raise EvaluatorError("the grader's process sent an invalid answer")
    return answer["ok"]


async def _open(launched: _Launched) -> tuple[socket.socket, dict[str, socket.socket]]:
    """A connection to a new grader, and its doors. OSError if the sandbox is gone."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    try:
        with theirs:
            socket.send_fds(launched.control, [b"g"], [theirs.fileno()])
        async with asyncio.timeout(LOAD_LIMIT_S):
            doors = await _receive_doors(ours)
    except TimeoutError as error:
        ours.close()
        raise ReplicaError(f"no grader started within {LOAD_LIMIT_S:g} s; check the load of the machine") from error
    except BaseException:
        ours.close()  # ends the grader
        raise
    launched.has_loaded = True
    return ours, doors


async def _stream(connection: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    try:
        return await asyncio.open_connection(sock=connection)
    except BaseException:
        connection.close()
        raise


async def _receive_doors(connection: socket.socket) -> dict[str, socket.socket]:
    """OSError if the other side is gone."""
    readable, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.add_reader(connection, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(connection)
    message, descriptors, _, _ = socket.recv_fds(connection, 1, len(DOORS))
    sockets = [socket.socket(fileno=descriptor) for descriptor in descriptors]
    if len(sockets) != len(DOORS):
        raise ConnectionResetError(f"the graders' sandbox sent {len(sockets)} sockets and {len(message)} bytes")
    return dict(zip(DOORS, sockets, strict=True))


async def _receive_answer(reader: asyncio.StreamReader) -> dict[str, Any]:
    """ValueError if the answer is invalid. It must be checked, because the process that sends it has read files that a
    policy may have written."""
    lengths = unpack_header(await reader.readexactly(HEADER.size))
    if sum(lengths) > MAX_ANSWER_BYTES:
        raise ValueError(f"an answer of {sum(lengths)} bytes")
    answer = orjson.loads((await reader.readexactly(sum(lengths)))[: lengths[0]])
    if not isinstance(answer, dict):
        raise ValueError("not an object")
    return answer


async def _end_grader(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """The supervisor sees our side closed and kills the grader; it closes its side when all of it has ended."""
    try:
        with contextlib.suppress(OSError):
            writer.write_eof()
        async with asyncio.timeout(END_LIMIT_S):
            while await reader.read(1 << 16):
                pass
    except TimeoutError as error:
        raise EvaluatorError(f"a grader is still running {END_LIMIT_S:g} s after SIGKILL") from error
    except OSError:
        pass  # closed already
    finally:
        writer.close()
