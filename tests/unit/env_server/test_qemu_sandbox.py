"""The sandbox of a virtual machine: its command line, the bridge in it, and the memory that machines share."""

import mmap
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from env_server.providers.bounds import Bounds, DesktopLimits
from env_server.providers.host_users import HostUsers
from env_server.providers.qemu import bridge
from env_server.providers.qemu.command import DirectBoot, Firmware, MachineSpec
from env_server.providers.qemu.memory import GuestMemory
from env_server.providers.qemu.walls import KVM_DEVICE, SandboxFiles, Walls, files_of, sandbox_command
from env_server.providers.requirements import SYSTEM_PATH, SYSTEM_PYTHON
from osworld_pipeline.errors import DependencyError

SPEC = MachineSpec(
    screen_size=(1280, 720),
    memory_mb=1024,
    num_cpus=1,
    accelerator="tcg",
    disks=(Path("/images/gold.qcow2"), Path("/images/base.qcow2")),
    boot=DirectBoot(kernel=Path("/images/vmlinuz"), initrd=Path("/images/initrd"), command_line="root=/dev/vda"),
    firmware=Firmware(code=Path("/usr/share/OVMF/code.fd"), variables=Path("/usr/share/OVMF/variables.fd")),
    files_archive=Path("/images/files.tar"),
)
FILES = SandboxFiles(read_only=files_of(SPEC), devices=(), bridge_fd=9, name_servers_fd=None)
ENDS = {"listener_fd": 7, "lifeline_fd": 8, "port": 5000}


def test_every_file_of_a_machine_is_shown_read_only() -> None:
    names = ("gold.qcow2", "base.qcow2", "vmlinuz", "initrd", "files.tar")
    for uid in (None, 60_706):
        command = sandbox_command(FILES, ["/usr/bin/qemu"], uid=uid, **ENDS)
        for number, name in enumerate(names):
            at = command.index(f"/images/{name}", command.index("bwrap"))
            at = command.index(f"/images/{name}", at + 1) if command[at - 1] == "--ro-bind" else at
            source = f"/images/{name}" if uid is None else f"/mnt/{number}"
            assert command[at - 2 : at] == ["--ro-bind", source]
        assert not {"--bind", "--bind-try", "--tmpfs", "--share-net"} & set(command)
        assert command[command.index("--remount-ro") + 1] == "/"


def test_no_name_server_is_named_without_a_network() -> None:
    assert "/etc/resolv.conf" not in sandbox_command(FILES, ["/usr/bin/qemu"], uid=None, **ENDS)
    opened = sandbox_command(replace(FILES, name_servers_fd=5), ["/usr/bin/qemu"], uid=None, **ENDS)
    assert opened[opened.index("/etc/resolv.conf") - 1] == "5"


SEES = """
import os, sys
device, *paths = sys.argv[4:]
os.close(os.open(device, os.O_RDWR))
for path in paths:
    for flags in (os.O_RDONLY, os.O_RDWR):
        try:
            os.close(os.open(path, flags))
        except OSError as error:
            print(error.strerror)
"""
"""Runs in the bridge's place."""


@pytest.mark.skipif(os.geteuid() != 0 or not KVM_DEVICE.exists(), reason="needs root and /dev/kvm")
def test_the_kvm_device_and_files_of_a_private_folder_can_be_used_in_the_sandbox(tmp_path: Path) -> None:
    disk = tmp_path / "private" / "disk.qcow2"
    disk.parent.mkdir(mode=0o700)
    disk.write_bytes(b"QFI\xfb")
    disk.chmod(0o666)
    with tempfile.TemporaryFile() as program:
        program.write(SEES.encode())
        program.seek(0)
        files = SandboxFiles(read_only=(disk,), devices=(KVM_DEVICE,), bridge_fd=program.fileno(), name_servers_fd=None)
        command = sandbox_command(files, [str(KVM_DEVICE), str(disk), "/root"], uid=60_706, **ENDS)
        done = subprocess.run(
            command, pass_fds=(program.fileno(),), capture_output=True, text=True, env={"PATH": SYSTEM_PATH}, check=True
        )
    # The disk can be read and not written, though its mode allows it; other folders are not there.
    assert done.stdout.splitlines() == ["Read-only file system"] + ["No such file or directory"] * 2


@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs QEMU as another user")
def test_a_file_that_qemus_user_may_not_read_is_named(tmp_path: Path) -> None:
    disk = tmp_path / "disk.qcow2"
    disk.write_bytes(b"QFI\xfb")
    disk.chmod(0o600)
    walls = Walls(HostUsers(()), Bounds(DesktopLimits(), version=0, bases=()))
    with pytest.raises(DependencyError, match=f"chmod o[+]r {disk}"):
        walls.check_readable([disk])
    disk.chmod(0o644)
    walls.check_readable([disk])


def test_a_saved_memory_is_mapped_and_never_written(tmp_path: Path) -> None:
    made = GuestMemory(1 << 24)
    os.pwrite(made.fd, b"booted", 1 << 20)
    made.save(tmp_path / "ram")
    made.close()
    assert (tmp_path / "ram").stat().st_blocks * 512 < 1 << 20, "zeros take no room"
    memory = GuestMemory.load(tmp_path / "ram")
    # Like QEMU: opened for writing, although the mapping is private.
    file = os.open(f"/proc/self/fd/{memory.fd}", os.O_RDWR)
    try:
        with mmap.mmap(file, 1 << 24, flags=mmap.MAP_PRIVATE) as mapped:
            assert mapped[1 << 20 : (1 << 20) + 6] == b"booted"
            mapped[0:4] = b"mine"
        for write in (lambda: os.pwrite(file, b"x", 0), lambda: os.ftruncate(file, 0)):
            with pytest.raises(PermissionError):
                write()
        with pytest.raises(PermissionError):
            mmap.mmap(file, 1 << 24, flags=mmap.MAP_SHARED)
        assert os.pread(file, 4, 0) == bytes(4)
    finally:
        os.close(file)
        memory.close()


QEMU = """
import socket, sys
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
while True:
    connection, _ = server.accept()
    said = connection.recv(99)
    connection.sendall(b"received " + said)
    connection.close()
    if said == b"end":
        break
"""
"""What the bridge starts: it answers, and it ends."""


@contextmanager
def running_bridge(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], str, int]]:
    """The bridge, its socket's path, and the server's end of its lifeline."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    path = str(folder / "s")
    theirs, ours = os.pipe()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        ends = [str(listener.fileno()), str(theirs), port]
        process = subprocess.Popen(
            [SYSTEM_PYTHON, "-IS", bridge.__file__, *ends, SYSTEM_PYTHON, "-ISc", QEMU, port],
            pass_fds=(listener.fileno(), theirs),
        )
    os.close(theirs)
    try:
        yield process, path, ours
    finally:
        process.kill()
        process.wait()
        with suppress(OSError):
            os.close(ours)
        with suppress(OSError), socket.create_connection(("127.0.0.1", int(port))) as qemu:
            qemu.sendall(b"end")  # there is no sandbox here that would end it


def ask(path: str, said: bytes) -> bytes:
    """Sends `said` again and again, until there is an answer."""
    end = time.monotonic() + 20.0
    while time.monotonic() < end:
        with socket.socket(socket.AF_UNIX) as caller, suppress(ConnectionError):
            caller.settimeout(10.0)
            caller.connect(path)
            caller.sendall(said)
            answer = b""
            while piece := caller.recv(99):
                answer += piece
            if answer:
                return answer
        time.sleep(0.01)
    raise AssertionError("no answer")


def test_the_bridge_carries_connections_and_ends_with_qemu(tmp_path: Path) -> None:
    with running_bridge(tmp_path) as (process, path, _):
        assert ask(path, b"hello") == b"received hello"
        with socket.socket(socket.AF_UNIX) as caller:
            caller.connect(path)
            caller.sendall(b"end")
            assert process.wait(10.0) == 0


def test_the_bridge_ends_with_the_server(tmp_path: Path) -> None:
    with running_bridge(tmp_path) as (process, path, lifeline):
        assert ask(path, b"hello") == b"received hello"
        os.close(lifeline)
        assert process.wait(10.0) == 1
