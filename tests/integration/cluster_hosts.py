"""Several hosts on one machine: each has its own network, processes, name, /tmp and /dev/shm (Linux namespaces), and
all see one shared folder. Switching a host off acts as a power cut: its link goes down and its processes are gone."""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

START_LIMIT_S = 20.0
COMMAND_LIMIT_S = 30.0
NETWORK = "10.77.0"
PROGRAMS = ("unshare", "nsenter", "setpriv", "mount", "ip")


@dataclass(kw_only=True)
class Host:
    name: str
    address: str
    folder: Path
    """Of this host alone: its /tmp, and logs."""
    init: "subprocess.Popen[bytes]"
    pid: int
    """Of its first process, in the machine's own numbering; all others end with it."""
    _programs: list["subprocess.Popen[bytes]"] = field(default_factory=list, init=False)

    def start(
        self, *command: str, environment: Mapping[str, str] | None = None, folder: Path | None = None
    ) -> "Running":
        """Starts a program on this host, in `folder`. Its output goes to a file."""
        log = self.folder / f"{len(self._programs):02d}-{Path(command[0]).name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*self._inside(folder), *command],
                env=self._environment(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._programs.append(process)
        return Running(process=process, log=log)

    def run(
        self,
        *command: str,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
        limit_s: float = COMMAND_LIMIT_S,
    ) -> str:
        """Runs a program that must succeed, and returns its output."""
        running = self.start(*command, environment=environment, folder=folder)
        running.wait(limit_s)
        return running.output()

    def switch_off(self) -> None:
        """Switches the host off. Nothing that its processes send while they end reaches another host."""
        self.run("ip", "link", "set", "eth0", "down")
        self.end()

    def end(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        for process in (self.init, *self._programs):
            process.wait(COMMAND_LIMIT_S)

    def _inside(self, folder: Path | None) -> list[str]:
        namespaces = ("--net", "--mount", "--uts", "--pid")
        return ["nsenter", f"--target={self.pid}", *namespaces, f"--wdns={folder or '/'}", "--"]

    def _environment(self, more: Mapping[str, str] | None) -> dict[str, str]:
        return {**os.environ, "HOME": "/tmp", "TMPDIR": "/tmp", **(more or {})}


@dataclass(frozen=True, kw_only=True)
class Running:
    process: "subprocess.Popen[bytes]"
    log: Path

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, limit_s: float) -> None:
        """Raises AssertionError if the program fails or takes longer."""
        try:
            status = self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not within {limit_s:.0f} s: {self.output()[-3000:]}") from None
        assert status == 0, f"status {status}: {self.output()[-4000:]}"

    def wait_for(self, text: str, limit_s: float) -> None:
        """Waits until the program's output contains this text."""
        deadline = time.monotonic() + limit_s
        while text not in self.output():
            assert self.process.poll() is None, f"it ended before '{text}': {self.output()[-4000:]}"
            assert time.monotonic() < deadline, f"not within {limit_s:.0f} s: '{text}': {self.output()[-4000:]}"
            time.sleep(0.1)


class Network:
    """Hosts on one switch."""

    def __init__(self, folder: Path) -> None:
        """`folder`: its path is that of the shared folder on all hosts."""
        self.shared = folder / "shared"
        self.shared.mkdir()
        self._folder = folder
        self._names = folder / "hosts"
        self._numbers: dict[str, int] = {}
        """By name, the last byte of the address."""
        self._hosts: list[Host] = []
        self._switch = _holder("unshare", "--net", "sleep", "infinity")
        _wait_until_unshared(self._switch.pid, "net")
        self._in_switch("ip", "link", "add", "switch", "type", "bridge")
        self._in_switch("ip", "link", "set", "switch", "up")

    def add(self, name: str) -> Host:
        """Switches a host on. A name that was used before means the same machine with an empty disk: it has the same
        addresses."""
        number = self._numbers.setdefault(name, len(self._numbers) + 1)
        address, folder = f"{NETWORK}.{number}", self._folder / f"{name}-{len(self._hosts)}"
        (folder / "tmp").mkdir(parents=True)
        self._names.write_text("127.0.0.1 localhost\n" + "".join(
            f"{NETWORK}.{one} {known}\n" for known, one in self._numbers.items()
        ))  # fmt: skip
        set_up = " && ".join(
            (
                f"hostname {name}",
                f"mount --bind {folder}/tmp /tmp",
                f"mount --bind {self._names} /etc/hosts",
                "mount -t tmpfs tmpfs /dev/shm",
                f"touch {folder}/is-set-up",
                "exec sleep infinity",
            )
        )
        namespaces = ("--net", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc")
        init = _holder("unshare", *namespaces, "sh", "-c", set_up)
        pid = _child_of(init, folder / "is-set-up")
        host = Host(name=name, address=address, folder=folder, init=init, pid=pid)
        port = f"port{len(self._hosts)}"
        hardware = f"02:00:00:00:00:{number:02x}"
        self._in_switch(
            *("ip", "link", "add", port, "type", "veth"),
            *("peer", "name", "eth0", "address", hardware, "netns", str(pid)),
        )
        self._in_switch("ip", "link", "set", port, "master", "switch")
        self._in_switch("ip", "link", "set", port, "up")
        for command in ("link set lo up", f"address add {address}/24 dev eth0", "link set eth0 up"):
            host.run("ip", *command.split())
        self._hosts.append(host)
        return host

    def close(self) -> None:
        for host in self._hosts:
            host.end()
        self._switch.kill()
        self._switch.wait(COMMAND_LIMIT_S)

    def _in_switch(self, *command: str) -> None:
        inside = ["nsenter", f"--target={self._switch.pid}", "--net", "--", *command]
        done = subprocess.run(inside, capture_output=True, text=True, timeout=COMMAND_LIMIT_S)
        assert done.returncode == 0, done.stderr


@contextmanager
def network() -> Iterator[Network]:
    """Skips the test where hosts cannot be made."""
    if os.geteuid() != 0:
        pytest.skip("hosts of their own network need root")
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)} (apt-get install util-linux iproute2)")
    # Not in /tmp, because each host has its own /tmp.
    with tempfile.TemporaryDirectory(prefix="hosts-", dir="/var/tmp", ignore_cleanup_errors=True) as folder:
        made = Network(Path(folder))
        try:
            yield made
        finally:
            made.close()


def _holder(*command: str) -> "subprocess.Popen[bytes]":
    """Starts a process that holds namespaces and ends with this process."""
    return subprocess.Popen(["setpriv", "--pdeathsig", "KILL", "--", *command], stdin=subprocess.DEVNULL)


def _wait_until_unshared(pid: int, kind: str) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while os.readlink(f"/proc/{pid}/ns/{kind}") == os.readlink(f"/proc/self/ns/{kind}"):
        assert time.monotonic() < deadline, "a namespace was not made"
        time.sleep(0.01)


def _child_of(init: "subprocess.Popen[bytes]", mark: Path) -> int:
    """The first process of the new namespaces, once `mark` exists."""
    deadline = time.monotonic() + START_LIMIT_S
    while not mark.exists():
        assert init.poll() is None, "a host could not be made"
        assert time.monotonic() < deadline, "a host was not made in time"
        time.sleep(0.01)
    (pid,) = Path(f"/proc/{init.pid}/task/{init.pid}/children").read_text().split()
    return int(pid)
