"""One virtual machine: start, commands, liveness and end. It owns no named file: its disk overlay is unlinked from the
start, and its monitor is a socket pair, so even a kill leaves no files behind."""

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import socket
import tempfile
import time
from pathlib import Path
from typing import IO

from env_server.providers.qemu.cell import Cell
from env_server.providers.qemu.command import Attachments, MachineSpec, qemu_arguments
from env_server.providers.qemu.memory import GuestMemory
from env_server.providers.qemu.programs import find
from env_server.providers.qemu.qmp import QmpClient
from env_server.providers.qemu.walls import Walls
from osworld_pipeline.errors import ReplicaError

START_LIMIT_S = 30.0
STOP_LIMIT_S = 10.0
MIGRATE_LIMIT_S = 120.0
WAKE_LIMIT_S = 20.0
SEED_BYTES = 32


class Machine:
    """Call `start` once; on failure, and at the end, `stop`."""

    def __init__(self, spec: MachineSpec, walls: Walls, *, name: str, open_network: bool = False) -> None:
        self.spec, self.name = spec, name
        self.open_network = open_network
        self._cell = Cell(walls, name=name)
        self._qmp: QmpClient | None = None
        self._wake_line: socket.socket | None = None
        self._overlay: IO[bytes] | None = None

    @property
    def qmp(self) -> QmpClient:
        if self._qmp is None:
            raise ReplicaError(f"the machine of {self.name} is not running; start or replace it")
        return self._qmp

    @property
    def pid(self) -> int | None:
        """The process id of QEMU on the host."""
        return self._cell.pid

    @property
    def guest_socket(self) -> str:
        """The path of the socket to the guest's server, usable only by this process."""
        return self._cell.guest_socket

    def is_alive(self) -> bool:
        return self._cell.is_alive()

    def stderr_tail(self) -> str:
        """The last output of QEMU and of the guest's console, for messages."""
        return " ".join(" ".join(self._cell.stderr_tail.lines).split())[-400:]

    def overlay_bytes(self) -> int:
        """Disk space that only this machine uses."""
        return 0 if self._overlay is None else os.fstat(self._overlay.fileno()).st_blocks * 512

    async def start(
        self,
        *,
        overlay: Path,
        memory: GuestMemory,
        shares_ram: bool,
        waits_for_state: bool,
        variables: Path | None = None,
    ) -> None:
        """Returns when QEMU has opened every file and answers; the machine runs unless it waits for a state. `overlay`
        and `variables` are templates that are copied, or with `shares_ram` the files that are written."""
        with contextlib.ExitStack() as stack:
            qmp, qmp_end = socket.socketpair()
            wake, wake_end = socket.socketpair()
            stack.callback(qmp_end.close)
            stack.callback(wake_end.close)
            self._wake_line = wake
            self._overlay = overlay.open("r+b") if shares_ram else unnamed_copy(overlay)
            variables_file = None
            if variables is not None:
                variables_file = stack.enter_context(variables.open("r+b") if shares_ram else unnamed_copy(variables))
            attached = Attachments(
                overlay_fd=self._overlay.fileno(),
                qmp_fd=qmp_end.fileno(),
                wake_fd=wake_end.fileno(),
                memory_fd=memory.fd,
                shares_ram=shares_ram,
                variables_fd=None if variables_file is None else variables_file.fileno(),
                waits_for_state=waits_for_state,
                open_network=self.open_network,
            )
            self._qmp = QmpClient(qmp, name=self.name)
            self._spawn(attached)
        wake.setblocking(False)
        try:
            await self._qmp.open(timeout_s=START_LIMIT_S)
        except ReplicaError as error:
            raise ReplicaError(f"{error}. Its output: {self.stderr_tail() or 'none'}") from error
        if self.open_network:
            await self._cell.open_network()

    def _spawn(self, attached: Attachments) -> None:
        fds = [attached.memory_fd, attached.overlay_fd, attached.qmp_fd, attached.wake_fd]
        if attached.variables_fd is not None:
            fds.append(attached.variables_fd)
        qemu = [find("qemu-system-x86_64"), *qemu_arguments(self.spec, attached)]
        self._cell.spawn(self.spec, qemu, fds=fds, has_network=self.open_network)

    async def restore(self, state: Path) -> None:
        """Loads the devices' state into a machine that waits for it, and starts it."""
        with state.open("rb") as file:
            await self._migrate("migrate-incoming", file)
        await self.qmp.execute("cont")

    async def save(self, state: Path) -> None:
        """Writes the devices' state of a machine that shares its memory file; it stays stopped."""
        await self.qmp.execute("stop")
        with state.open("wb") as file:
            await self._migrate("migrate", file)

    async def _migrate(self, command: str, file: IO[bytes]) -> None:
        wanted = [{"capability": name, "state": True} for name in ("events", "x-ignore-shared")]
        await self.qmp.execute("migrate-set-capabilities", {"capabilities": wanted})
        await self.qmp.execute("getfd", {"fdname": "state"}, fds=[file.fileno()])
        over = self.qmp.expect("MIGRATION", lambda data: data.get("status") in ("completed", "failed", "cancelled"))
        await self.qmp.execute(command, {"uri": "fd:state"})
        status = (await over.wait(MIGRATE_LIMIT_S)).get("status")
        if status != "completed":
            raise ReplicaError(f"the state of {self.name} could not be transferred ({status}): {self.stderr_tail()}")

    async def wake(self) -> None:
        """Sends process 1 of our own image the time and a random seed, and opens the network if configured. Returns
        once it has answered, which means that its kernel runs."""
        assert self._wake_line is not None, "started"
        message = {"time_s": time.time(), "seed": secrets.token_hex(SEED_BYTES), "open_network": self.open_network}
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(WAKE_LIMIT_S):
                await loop.sock_sendall(self._wake_line, json.dumps(message).encode() + b"\n")
                answer = b""
                while not answer.endswith(b"\n"):
                    piece = await loop.sock_recv(self._wake_line, 4096)
                    if not piece:
                        raise ReplicaError(f"the machine of {self.name} ended during its wake-up: {self.stderr_tail()}")
                    answer += piece
        except (TimeoutError, OSError) as error:
            raise ReplicaError(f"the machine of {self.name} did not wake up within {WAKE_LIMIT_S:g} s") from error
        if b'"ok": true' not in answer:
            raise ReplicaError(f"the machine of {self.name} could not wake up: {answer.decode(errors='replace')}")

    async def quit(self) -> None:
        """Ends QEMU cleanly, with everything written."""
        with contextlib.suppress(ReplicaError):
            await self.qmp.execute("quit")
        await self.stop(grace_s=STOP_LIMIT_S)

    async def stop(self, *, grace_s: float = 0.0) -> None:
        """Idempotent, and completed even if the caller is cancelled."""
        await asyncio.shield(asyncio.ensure_future(self._stop(grace_s)))

    async def _stop(self, grace_s: float) -> None:
        if grace_s:
            with contextlib.suppress(TimeoutError):
                await self._cell.wait(grace_s)
        try:
            await self._cell.stop()
            if self._qmp is not None:
                await self._qmp.close()
        finally:
            for owned in (self._wake_line, self._overlay):
                if owned is not None:
                    owned.close()


def unnamed_copy(template: Path) -> IO[bytes]:
    """An unnamed copy in the template's folder: it is removed with the last process that has it open."""
    try:
        copy = tempfile.TemporaryFile(dir=template.parent)  # noqa: SIM115 - the machine closes it
        with template.open("rb") as source:
            shutil.copyfileobj(source, copy)
        copy.flush()
    except OSError as error:
        raise ReplicaError(f"no disk overlay can be made in {template.parent} ({error}); free some space") from error
    return copy
