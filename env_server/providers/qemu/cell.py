"""The processes of one sandboxed QEMU: its sandbox with the bridge in it, and slirp4netns if its network is open. They
run as a separate host user, in a separate control group, and end with the server, however it ends."""

import asyncio
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from env_server.providers.bubblewrap import children_of, nameless_listener
from env_server.providers.host_resources import HostResources
from env_server.providers.qemu.command import MachineSpec
from env_server.providers.qemu.network import NAME_SERVERS, OpenNetwork
from env_server.providers.qemu.walls import KVM_DEVICE, SandboxFiles, Walls, files_of, sandbox_command
from env_server.providers.requirements import SYSTEM_PATH
from env_server.providers.stderr_tail import StderrTail
from osworld_pipeline.domain.remedies import how_to_set_up
from osworld_pipeline.errors import DependencyError, ReplicaError

_BRIDGE = Path(__file__).parent / "bridge.py"


class Cell:
    """Call `spawn` one time, and `open_network` when QEMU answers; at the end, and on failure, `stop`."""

    def __init__(self, walls: Walls, *, name: str) -> None:
        self._walls, self._name = walls, name
        self._held = HostResources(f"QEMU of {name}", walls.users, stop_limit_s=walls.releases.limits.one_s)
        self._network: OpenNetwork | None = None
        self._socket_fd: int | None = None
        self._lifeline_fd: int | None = None

    @property
    def stderr_tail(self) -> StderrTail:
        return self._held.stderr_tail

    @property
    def pid(self) -> int | None:
        """The process id of QEMU on the host; None while it is not running."""
        process = self._held.process
        bridges = [] if process is None else children_of(process.pid)
        return next((pid for bridge in bridges for pid in children_of(bridge)), None)

    @property
    def guest_socket(self) -> str:
        """The path of the socket to the guest's server, usable only by this process."""
        if self._socket_fd is None:
            raise ReplicaError(f"the machine of {self._name} is not running; start or replace it")
        return f"/proc/self/fd/{self._socket_fd}"

    def is_alive(self) -> bool:
        process, has_network = self._held.process, self._network is None or self._network.is_alive()
        return process is not None and process.poll() is None and has_network

    def spawn(self, spec: MachineSpec, qemu: Sequence[str], *, fds: Sequence[int], has_network: bool) -> None:
        """Starts QEMU, which inherits the descriptors.

        Raises:
            DependencyError: bubblewrap is missing, or a file cannot be read.
        """
        self._walls.check_readable(files_of(spec))
        held = self._held
        uid = held.uid = self._walls.users.claim()
        group = held.group = self._walls.bounds.make_group()
        listener, self._socket_fd = nameless_listener()
        held.descriptors.append(self._socket_fd)
        lifeline_fd, other_end = os.pipe()
        held.descriptors += (lifeline_fd, other_end)
        self._lifeline_fd = lifeline_fd
        with listener, _BRIDGE.open("rb") as bridge, _text(NAME_SERVERS) as name_servers:
            files = SandboxFiles(
                read_only=files_of(spec),
                devices=(KVM_DEVICE,) if spec.accelerator == "kvm" else (),
                bridge_fd=bridge.fileno(),
                name_servers_fd=name_servers.fileno() if has_network else None,
            )
            command = sandbox_command(
                files,
                qemu,
                uid=uid,
                listener_fd=listener.fileno(),
                lifeline_fd=lifeline_fd,
                port=spec.guest_port,
            )
            inherited = (*fds, listener.fileno(), lifeline_fd, bridge.fileno(), name_servers.fileno())
            try:
                with held.stderr_tail.capture() as output:
                    held.process = subprocess.Popen(
                        command if group is None else group.entering(command),
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=output,
                        pass_fds=inherited,
                        start_new_session=True,
                        cwd="/",
                        env={"PATH": SYSTEM_PATH},
                    )
            except OSError as error:
                raise DependencyError(f"cannot start bubblewrap ({error}); run `{how_to_set_up('qemu')}`") from error

    async def open_network(self) -> None:
        """
        Raises:
            ReplicaError: the sandbox has ended, or the network was not up in time.
            DependencyError: slirp4netns is not installed, or does not work here.
        """
        held = self._held
        assert held.process is not None, "spawned"
        assert self._lifeline_fd is not None, "spawned"
        inside = children_of(held.process.pid)
        if not inside:
            raise ReplicaError(f"the machine of {self._name} ended before it had a network; replace the replica")
        self._network = OpenNetwork(name=self._name)
        held.parts.append(self._network)
        await self._network.start(inside[0], uid=held.uid, group=held.group, lifeline_fd=self._lifeline_fd)

    async def wait(self, timeout_s: float) -> None:
        """Waits until QEMU has ended by itself. TimeoutError if it does not end within `timeout_s`."""
        await asyncio.wait_for(self.stderr_tail.is_silent.wait(), timeout_s)

    async def stop(self) -> None:
        """Kills it. Idempotent. Processes that have not ended within the limit are ended in the background."""
        self._socket_fd = None
        await self._walls.releases.release(self._held)


def _text(content: bytes) -> IO[bytes]:
    """An unnamed file, positioned at its beginning."""
    file = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    file.write(content)
    file.seek(0)
    return file
