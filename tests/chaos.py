"""Injects random faults into a training phase: its programs, each in its own process, are killed at moments drawn from
a seed and started again, and a small disk fills up. The trainer is restarted until it ends successfully."""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent
READY_LIMIT_S = 120.0
STOP_LIMIT_S = 30.0
FILLED_LIMIT_S = 8.0
"""How long the disk stays full where the trainer does not end of it."""
DISK_MB = 96
BLOCK_BYTES = 1 << 16
MAX_REPORTS = 2
"""Times that the trainer may speak, after it was started or hit, before the next fault comes."""
MAX_PAUSE_S = 1.0
"""From such a word to the fault."""
DOWN_S = (0.1, 1.0)
"""How long a killed server is away."""
PATIENCE_S = 6.0
"""For so long a fault that is to hit episodes waits for them."""
SILENT_SHARE = 0.15
"""Of the faults that come while the trainer is still starting."""


class Fault(StrEnum):
    TRAINER = "trainer"
    ENV_SERVER = "env server"
    DESKTOP = "desktop"
    POLICY_SERVER = "policy server"
    DISK = "disk"


@dataclass(kw_only=True, eq=False)
class Program:
    """A program that its command starts as often as needed. All its output goes to one log."""

    command: Sequence[str]
    log: Path
    job: Path = Path(os.devnull)
    """Its standard input."""
    environment: Mapping[str, str] = field(default_factory=dict)
    num_starts: int = 0
    start_at: float = 0.0
    """Monotonic; not before then."""
    said_from: int = 0
    """Where in the log its last start begins."""
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.said_from = self.log.stat().st_size if self.log.exists() else 0
        self.num_starts += 1
        with self.log.open("ab") as log, self.job.open("rb") as job:
            self.process = subprocess.Popen(
                list(self.command),
                stdin=job,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", **self.environment},
            )

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def pid(self) -> int:
        assert self.process is not None, "it was never started"
        return self.process.pid

    def kill(self) -> None:
        assert self.process is not None, "it was never started"
        self.process.kill()
        self.process.wait(STOP_LIMIT_S)

    def stop(self) -> None:
        """Sends SIGTERM, and SIGKILL if the process does not end."""
        if self.process is None:
            return
        with suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def said(self) -> str:
        """The output since the program was last started."""
        with self.log.open("rb") as log:
            log.seek(self.said_from)
            return log.read().decode(errors="replace")

    def messages(self) -> list[dict[str, Any]]:
        """The complete lines of JSON that the program has printed since it was last started."""
        lines = self.said().split("\n")[:-1]
        return [json.loads(line) for line in lines if line.startswith("{")]


@dataclass(kw_only=True, eq=False)
class Server(Program):
    url: str

    def wait_ready(self) -> None:
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        deadline = time.monotonic() + READY_LIMIT_S
        while True:
            assert self.is_running, f"it ended: {self.said()[-2000:]}"
            assert time.monotonic() < deadline, f"{self.url} does not listen: {self.said()[-2000:]}"
            with suppress(OSError), socket.create_connection((host, int(port)), timeout=1.0):
                return
            time.sleep(0.05)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def env_server(folder: Path, *, images: Path, num_replicas: int, screen: tuple[int, int]) -> Iterator[Server]:
    """Serves local desktops on a port that stays the same; its temporary files are in `<folder>/tmp` (a link)."""
    # Short, because a Unix socket's path may have 107 characters.
    temporary = Path(tempfile.mkdtemp(prefix="ch-"))
    (folder / "tmp").symlink_to(temporary)
    port = free_port()
    server = Server(
        url=f"http://127.0.0.1:{port}",
        command=[
            sys.executable, "-m", "env_server.main", "--provider", "local", "--replicas", str(num_replicas),
            "--host", "127.0.0.1", "--port", str(port), "--screen-size", f"{screen[0]}x{screen[1]}",
            "--state-dir", str(images), "--die-with-parent", str(os.getpid()),
        ],
        log=folder / "env-server.log",
        environment={"TMPDIR": str(temporary)},
    )  # fmt: skip
    with running(server):
        yield server
    shutil.rmtree(temporary)


@contextmanager
def policy_server(folder: Path, *, checkpoint: Path) -> Iterator[Server]:
    port = free_port()
    server = Server(
        url=f"http://127.0.0.1:{port}",
        command=[sys.executable, str(TESTS / "policy_server.py"), str(checkpoint), str(port), str(os.getpid())],
        log=folder / "policy-server.log",
    )
    with running(server):
        yield server


@contextmanager
def running(server: Server) -> Iterator[None]:
    try:
        server.start()
        yield
    finally:
        server.stop()


@contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """Makes `folder` a separate file system inside the block. Yields False where mounting is not allowed."""
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", str(folder)]
    try:
        is_mounted = subprocess.run(mount, capture_output=True).returncode == 0
    except FileNotFoundError:
        is_mounted = False
    try:
        yield is_mounted
    finally:
        if is_mounted:
            # Lazily, because every desktop that was started in the block also has this mount in its own namespace.
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill_up(disk: Path, *, spare_bytes: int) -> Path:
    """Writes a file that leaves `spare_bytes` of the disk free, and returns its path."""
    ballast = disk / ".ballast"
    with ballast.open("wb") as file, suppress(OSError):
        while (left := shutil.disk_usage(disk).free - spare_bytes) > 0:
            file.write(bytes(min(left, BLOCK_BYTES)))
            file.flush()
    return ballast


@dataclass(kw_only=True, eq=False)
class Chaos:
    """Carries out `plan`, one fault after another. Causes no more faults once `trainer` has ended successfully."""

    trainer: Program
    servers: Mapping[Fault, Server]
    victims: Callable[[], Sequence[int]]
    """Pids of which one is the next desktop to be killed."""
    num_live: Callable[[], int]
    """Episodes that are running now."""
    num_replicas: int
    disk: Path | None
    checkpoint_bytes: int
    """About the size of what the trainer saves."""
    plan: list[Fault]
    rng: random.Random
    done: Counter[Fault] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    """How the trainer ended, each time."""
    story: list[str] = field(default_factory=list)
    _num_received: int = 0
    """Of what the trainer has said since it was started, by the time of the last fault."""
    _wait_reports: int | None = None
    _due_at: float | None = None
    _freed_at: float | None = None
    _begun_at: float = field(default_factory=time.monotonic)

    def run(self, *, limit_s: float) -> None:
        deadline = self._begun_at + limit_s
        self.trainer.start()
        while True:
            assert time.monotonic() < deadline, f"not done within {limit_s:.0f} s: {self.reported()}"
            for server in self.servers.values():
                if not server.is_running and time.monotonic() >= server.start_at:
                    server.start()
            if not self.trainer.is_running:
                if self._has_ended_well():
                    return
                self._free_disk()
                self.trainer.start()
                self._num_received = 0
            if self._freed_at is not None and time.monotonic() >= self._freed_at:
                self._free_disk()
            self._next_fault()
            time.sleep(0.02)

    def reported(self) -> str:
        return f"faults {dict(self.done)}, trainer ended {dict(self.ends)}; {'; '.join(self.story)}"

    def _has_ended_well(self) -> bool:
        assert self.trainer.process is not None
        status = self.trainer.process.returncode
        if status == -signal.SIGKILL:
            return False
        messages = self.trainer.messages()
        last = messages[-1] if messages else {}
        self._note(f"trainer ended with {status}: {last.get('message', last.get('result'))}")
        if status == 0:
            return True
        assert last.get("kind") == "error", f"{self.reported()}\n{self.trainer.said()[-3000:]}"
        is_disk = last["type"] == "StoreError" and self.done[Fault.DISK] > 0
        assert last["retryable"] or is_disk, self.reported()
        if is_disk and self._freed_at is not None:
            assert "no disk space left" in last["message"], self.reported()
        self.ends[last["type"]] += 1
        # In any case, a trainer that no further fault hits must end successfully.
        assert self.ends.total() <= 3 * (self.done.total() + 1), self.reported()
        return False

    def _next_fault(self) -> None:
        if not self.plan or self._freed_at is not None:
            return
        if self._due_at is None:
            if self._wait_reports is None:
                is_early = self.rng.random() < SILENT_SHARE
                self._wait_reports = 0 if is_early else self.rng.randint(1, MAX_REPORTS)
            if len(self.trainer.messages()) - self._num_received < self._wait_reports:
                return
            self._due_at = time.monotonic() + self.rng.uniform(0.0, MAX_PAUSE_S)
        fault, late_s = self.plan[0], time.monotonic() - self._due_at
        is_now = late_s >= 0 and (late_s >= PATIENCE_S or self._hits_episodes(fault))
        if is_now and self._cause(fault):
            self.plan.pop(0)
            self.done[fault] += 1
            self._due_at = self._wait_reports = None
            self._num_received = len(self.trainer.messages())

    def _hits_episodes(self, fault: Fault) -> bool:
        """Whether the fault would now hit an episode. Faults of the trainer and the disk may occur at any time."""
        if fault is Fault.DESKTOP:
            return self.num_live() == self.num_replicas
        return fault in (Fault.TRAINER, Fault.DISK) or self.num_live() > 0

    def _cause(self, fault: Fault) -> bool:
        """Causes the fault. Returns False if there is nothing to break now."""
        if fault is Fault.TRAINER:
            if not self.trainer.is_running:
                return False
            self.trainer.kill()
            # If the trainer has just reported an error, that error is its own end, not the kill's.
            self.ends["killed"] += 1
        elif fault is Fault.DESKTOP:
            victims = self.victims()
            if not victims:
                return False
            with suppress(ProcessLookupError):
                os.kill(self.rng.choice(victims), signal.SIGKILL)
        elif fault is Fault.DISK:
            assert self.disk is not None, "planned where there is a disk alone"
            fill_up(self.disk, spare_bytes=self.rng.randint(self.checkpoint_bytes // 20, self.checkpoint_bytes))
            self._freed_at = time.monotonic() + FILLED_LIMIT_S
        else:
            server = self.servers[fault]
            if not server.is_running:
                return False
            server.kill()
            server.start_at = time.monotonic() + self.rng.uniform(*DOWN_S)
        self._note(f"{fault}")
        return True

    def _free_disk(self) -> None:
        if self._freed_at is not None:
            assert self.disk is not None
            (self.disk / ".ballast").unlink()
            self._freed_at = None

    def _note(self, what: str) -> None:
        self.story.append(f"{time.monotonic() - self._begun_at:.1f} s {what}")


def plan_faults(kinds: Sequence[Fault], num: int, rng: random.Random) -> list[Fault]:
    """Plans each kind once, as far as `num` allows, in random order, and then random kinds."""
    plan = rng.sample(kinds, min(num, len(kinds)))
    return plan + [rng.choice(kinds) for _ in range(num - len(plan))]
