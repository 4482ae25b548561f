"""The open network of a machine's sandbox: slirp4netns opens ordinary connections of the host for the sandbox, which
can reach everything that the host reaches, except the host's loopback."""

import asyncio
import contextlib
import os
import subprocess

from env_server.providers.bounds import Group
from env_server.providers.qemu.programs import find
from env_server.providers.qemu.walls import TUN_DEVICE, as_user
from env_server.providers.requirements import SYSTEM_PATH
from env_server.providers.stderr_tail import StderrTail
from osworld_pipeline.domain.remedies import how_to_set_up
from osworld_pipeline.errors import DependencyError, ReplicaError

START_LIMIT_S = 20.0
STOP_LIMIT_S = 10.0
_SUBNET = "10.0.3.0/24"
"""Different from QEMU's own network, which the guest is in."""
NAME_SERVERS = b"nameserver 10.0.3.3\n"
_DEVICE = "tap0"


class OpenNetwork:
    """Call `start` once; at the end, and on failure, `close`."""

    def __init__(self, *, name: str) -> None:
        self._name = name
        self._process: subprocess.Popen[bytes] | None = None
        self._stderr_tail = StderrTail()

    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    async def start(self, inside_pid: int, *, uid: int | None, group: Group | None, lifeline_fd: int) -> None:
        """Connects the namespaces of process `inside_pid`. slirp4netns ends when the lifeline's other end is closed.

        Raises:
            DependencyError: slirp4netns is not installed, or does not work here.
            ReplicaError: the network was not up in time.
        """
        ready, ready_end = os.pipe()
        try:
            command = self._command(inside_pid, uid, ready_fd=ready_end, lifeline_fd=lifeline_fd)
            with self._stderr_tail.capture() as stderr:
                self._process = subprocess.Popen(  # noqa: ASYNC220 - starting it takes a millisecond
                    command if group is None else group.entering(command),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=stderr,
                    pass_fds=(ready_end, lifeline_fd),
                    start_new_session=True,
                    cwd="/",
                    env={"PATH": SYSTEM_PATH},
                )
            os.close(ready_end)
            ready_end = -1
            await self._until_ready(ready)
        except OSError as error:
            raise DependencyError(f"cannot start slirp4netns ({error}); run `{how_to_set_up('qemu')}`") from error
        finally:
            os.close(ready)
            if ready_end >= 0:
                os.close(ready_end)

    def _command(self, inside_pid: int, uid: int | None, *, ready_fd: int, lifeline_fd: int) -> list[str]:
        limits = ["--disable-host-loopback", "--enable-sandbox", "--enable-seccomp"]
        ends = ["--ready-fd", str(ready_fd), "--exit-fd", str(lifeline_fd)]
        slirp = [find("slirp4netns"), "--configure", "--cidr", _SUBNET, *limits, *ends]
        return [*as_user(uid, devices=(TUN_DEVICE,)), *slirp, str(inside_pid), _DEVICE]

    async def _until_ready(self, ready: int) -> None:
        loop = asyncio.get_running_loop()
        answered = asyncio.Event()
        loop.add_reader(ready, answered.set)
        try:
            async with asyncio.timeout(START_LIMIT_S):
                await answered.wait()
        except TimeoutError as error:
            raise ReplicaError(f"the network of {self._name} was not up within {START_LIMIT_S:g} s") from error
        finally:
            loop.remove_reader(ready)
        if not os.read(ready, 1):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stderr_tail.is_silent.wait(), STOP_LIMIT_S)
            said = " ".join(self._stderr_tail.lines)[-300:]
            raise DependencyError(f"slirp4netns failed to connect {self._name}: {said or 'no message'}")

    async def close(self) -> None:
        """Idempotent."""
        if self._process is None:
            return
        self._process.kill()
        try:
            async with asyncio.timeout(STOP_LIMIT_S):
                while not self._stderr_tail.is_silent.is_set():
                    self._stderr_tail.kill_writers()
                    await asyncio.sleep(0.02)
            self._process.wait(1.0)
        except (TimeoutError, subprocess.TimeoutExpired) as error:
            raise ReplicaError(
                f"slirp4netns of {self._name} is still running {STOP_LIMIT_S:g} s after SIGKILL"
            ) from error
