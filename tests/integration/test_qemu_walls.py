"""How a virtual machine is isolated from its host: no port, no privilege, no way to the host's loopback."""

import asyncio
import os
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from test_qemu_desktop import IMAGES, MISSING, REPOSITORY, desktops, is_running, until

from env_server.providers.qemu.provider import QemuDesktop

pytestmark = [
    pytest.mark.vm,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(MISSING), reason=f"no virtual machines here: {', '.join(MISSING)} missing"),
]
NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
OTHER_USER = 65534


@pytest.fixture
def open_before() -> set[int]:
    """Ports that earlier tests in this process left open."""
    return listening_ports(sockets_of(descendants(os.getpid()) | {os.getpid()}))


@pytest.fixture
async def desktop(open_before: set[int]) -> AsyncIterator[QemuDesktop]:
    """A desktop with the network allowed, which must not weaken its isolation."""
    async with desktops(open_network=True) as provider:
        yield await provider.start("replica-0")


def descendants(pid: int) -> set[int]:
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found |= {child} | descendants(child)
    return found


def status_of(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def sockets_of(pids: set[int]) -> set[str]:
    """Inodes of the sockets of these processes."""
    links: list[str] = []
    for link in (link for pid in pids for link in Path(f"/proc/{pid}/fd").iterdir()):
        with suppress(FileNotFoundError):  # the descriptor of the folder itself, if the process is this one
            links.append(os.readlink(link))
    return {link.removeprefix("socket:[").removesuffix("]") for link in links if link.startswith("socket:[")}


def listening_ports(inodes: set[str]) -> set[int]:
    """Ports in this host's network on which one of these sockets listens."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and row[9] in inodes}


def as_other_user(program: str, *arguments: str) -> str:
    """The output of a Python program that another local user runs."""
    user = ["setpriv", "--reuid", str(OTHER_USER), "--regid", str(OTHER_USER), "--clear-groups", "--"]
    command = [*user, "/usr/bin/python3", "-IS", "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=30.0, check=True, cwd="/").stdout.strip()


ASK_PORT = """
import socket, sys
with socket.create_connection(("127.0.0.1", int(sys.argv[1])), 10) as guest:
    guest.sendall(b"GET /platform HTTP/1.0\\r\\n\\r\\n")
    print(guest.recv(12))
"""
ASK_PATH = """
import socket, sys
guest = socket.socket(socket.AF_UNIX)
try:
    guest.connect(sys.argv[1])
except PermissionError:
    print("denied")
"""


@NEEDS_ROOT
async def test_no_other_local_user_reaches_the_guest_agent(desktop: QemuDesktop, open_before: set[int]) -> None:
    ours = descendants(os.getpid()) | {os.getpid()}
    for port in listening_ports(sockets_of(ours)) - open_before:
        answer = await asyncio.to_thread(as_other_user, ASK_PORT, str(port))
        assert not answer.startswith("b'HTTP"), f"port {port} answers {answer}"
    path = desktop.guest.address.removeprefix("unix:").replace("/self/", f"/{os.getpid()}/")
    assert await asyncio.to_thread(as_other_user, ASK_PATH, path) == "denied"


async def test_a_machine_listens_on_no_port_of_the_host(desktop: QemuDesktop, open_before: set[int]) -> None:
    assert desktop.is_alive()
    assert listening_ports(sockets_of(descendants(os.getpid()))) - open_before == set()


@contextmanager
def listener(address: str) -> Iterator[int]:
    """Listens on `address` and greets each caller. Yields the port."""
    server = socket.create_server((address, 0))

    def greet() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection:
                connection.sendall(b"reached")

    thread = threading.Thread(target=greet, daemon=True)
    thread.start()
    try:
        yield server.getsockname()[1]
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join(5.0)


def own_address() -> str | None:
    """This host's address in its network; None where it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            return None
        return probe.getsockname()[0]


PROBE = """
import socket, sys, threading
def ask(address):
    try:
        with socket.create_connection((address, {port}), 3) as caller:
            print(address, caller.recv(99).decode())
    except OSError as error:
        print(address, error)
for address in {addresses}:
    threading.Thread(target=ask, args=(address,)).start()
"""


async def test_an_open_network_reaches_the_outside_and_not_the_hosts_loopback(desktop: QemuDesktop) -> None:
    gateways = ("10.0.2.2", "10.0.2.3", "10.0.3.2", "10.0.3.3", "127.0.0.1")
    with listener("127.0.0.1") as port:
        result = await desktop.guest.run_python(PROBE.format(addresses=gateways, port=port))
        assert len(result.output.splitlines()) == len(gateways), result.error
        assert "reached" not in result.output, "it leads to the host's loopback"
    address = own_address()
    if address is not None:
        with listener(address) as port:
            result = await desktop.guest.run_python(PROBE.format(addresses=(address,), port=port))
            assert "reached" in result.output, result.error


async def test_qemu_has_no_privilege_and_runs_in_a_control_group() -> None:
    async with desktops() as provider:
        desktop = await provider.start("replica-0")
        pid = desktop.machine.pid
        assert pid is not None
        assert os.readlink(f"/proc/{pid}/exe").rpartition("/")[2].startswith("qemu-system")
        status = status_of(pid)
        assert "0" not in status["Uid"].split() + status["Gid"].split()
        assert {status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
        assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
        for kind in ("mnt", "pid", "ipc", "uts", "net", "user"):
            assert os.readlink(f"/proc/{pid}/ns/{kind}") != os.readlink(f"/proc/self/ns/{kind}"), kind
        mounts = mounts_of(pid)
        assert IMAGES.as_posix() in " ".join(mounts), "its own files are there"
        assert "/home" not in mounts
        assert {place: flags for place, flags in mounts.items() if "rw" in flags and is_disk(place)} == {}
        if "no control group" not in provider.details:
            assert f"osworld-desktop-{os.getpid()}-" in read(f"/proc/{pid}/cgroup")


def mounts_of(pid: int) -> dict[str, list[str]]:
    """The flags of each mount, by its place."""
    rows = [line.split() for line in read(f"/proc/{pid}/mountinfo").splitlines()]
    return {row[4]: row[5].split(",") for row in rows}


def is_disk(place: str) -> bool:
    """Whether the place is outside the kernel's own file systems and outside /dev, which has only harmless nodes."""
    return not place.startswith(("/proc", "/dev"))


def read(path: str) -> str:
    return Path(path).read_text()


SERVER = """
import asyncio, sys
from pathlib import Path
from env_server.providers.qemu.provider import QemuProvider
async def main():
    provider = QemuProvider(images=Path(sys.argv[1]), screen_size=(1024, 768), accelerator="tcg", open_network=True)
    desktop = await provider.start("replica-0")
    print(flush=True)
    while True:
        await desktop.reset()
asyncio.run(main())
"""


@pytest.mark.parametrize("delay_s", [0.0, 0.15, 0.4])
async def test_nothing_is_left_of_a_killed_server(delay_s: float) -> None:
    """The server is killed at any moment of a reset."""
    server = subprocess.Popen(  # noqa: ASYNC220 - starting it takes a millisecond
        [sys.executable, "-c", SERVER, str(IMAGES)], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY
    )
    assert server.stdout is not None
    with server.stdout:
        assert await asyncio.to_thread(server.stdout.readline) == "\n"
        before = sorted(os.listdir(IMAGES))
        await asyncio.sleep(delay_s)
        started = descendants(server.pid)
        server.kill()
        server.wait(10)

    async def is_gone() -> bool:
        return not any(map(is_running, started)) and not groups_of(server.pid)

    await until(is_gone, "the end of all processes and control groups")
    assert sorted(os.listdir(IMAGES)) == before


def groups_of(pid: int) -> list[Path]:
    """Control groups of that server; one with a process in it cannot be removed."""
    return list(Path("/sys/fs/cgroup").glob(f"**/osworld-desktop-{pid}-*"))
