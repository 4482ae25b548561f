"""Limits for the memory, processes and CPU time of a whole desktop: a control group each (version 1 or 2) if this
process may create one, else limits per process."""

import asyncio
import contextlib
import itertools
import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

from osworld_pipeline.errors import ReplicaError

DEFAULT_MEMORY_BYTES = 1024 * 1024 * 1024
SMALLEST_MEMORY_BYTES = 256 * 1024 * 1024
DEFAULT_NUM_PROCESSES = 512
SMALLEST_NUM_PROCESSES = 64
MEMORY_SLACK_BYTES = 8 * 1024 * 1024
"""A group may be this far below its limit when the kernel refuses memory: it allocates several pages at once."""
REMOVE_LIMIT_S = 5.0
_PREFIX = "osworld-desktop-"
_CONTROLLERS = ("memory", "pids")
_CPU_CONTROLLERS = ("cpu", "cpuacct")
"""The controllers of version 1; version 2 has only `cpu`. Without these controllers the other limits still apply."""
SMALLEST_MAX_CPUS = 0.1
CPU_PERIOD_US = 100_000
DEFAULT_CPU_WEIGHTS = {"cpu.weight": 100, "cpu.shares": 1024}
"""File of version 2, of version 1 -> its default in a new group."""
_ENTER = 'while [ "$1" != -- ]; do echo 0 > "$1" || exit 125; shift; done; shift; exec "$@"'
"""The shell enters each group, and then runs the command with exec."""
_JANITOR = (
    'read -r _; prefix=$1; shift; n=0; while [ $n -lt 50 ]; do found=; for base in "$@"; do '
    'for group in "$base/$prefix"*; do [ -d "$group" ] && { rmdir "$group" 2>/dev/null || found=1; }; done; done; '
    '[ -z "$found" ] && exit; n=$((n+1)); sleep 0.1; done'
)
"""Waits for the end of its input, which closes when the server ends in any way, and removes its groups."""


@dataclass(frozen=True, kw_only=True)
class DesktopLimits:
    """Limits of all processes and files of one desktop together."""

    memory_bytes: int = DEFAULT_MEMORY_BYTES
    num_processes: int = DEFAULT_NUM_PROCESSES
    max_cpus: float | None = None
    """None sets no quota: CPU time is shared by equal weights."""

    def __post_init__(self) -> None:
        if self.memory_bytes < SMALLEST_MEMORY_BYTES:
            least = SMALLEST_MEMORY_BYTES
            raise ValueError(f"a desktop needs at least {least} bytes of memory, not {self.memory_bytes}")
        if self.num_processes < SMALLEST_NUM_PROCESSES:
            raise ValueError(f"a desktop needs at least {SMALLEST_NUM_PROCESSES} processes, not {self.num_processes}")
        if self.max_cpus is not None and self.max_cpus < SMALLEST_MAX_CPUS:
            raise ValueError(f"a desktop needs at least {SMALLEST_MAX_CPUS:g} CPUs, not {self.max_cpus:g}")


OutOfMemory = Literal["own", "host"]
"""`own`: the desktop reached its own limit. `host`: the machine had no memory left; the desktop is not at fault."""


@dataclass(frozen=True)
class Group:
    """One desktop's control group: a folder per hierarchy (one in version 2)."""

    folders: tuple[Path, ...]

    def entering(self, command: list[str]) -> list[str]:
        """The command line that runs `command` inside."""
        return ["/bin/sh", "-c", _ENTER, "sh", *(f"{folder}/cgroup.procs" for folder in self.folders), "--", *command]

    def out_of_memory(self) -> OutOfMemory | None:
        """The cause if the kernel killed processes of the group for lack of memory; None if not, or if unknown."""
        counts: dict[str, int] = {}
        for folder, name in itertools.product(self.folders, ("memory.events", "memory.oom_control")):
            with contextlib.suppress(OSError):
                pairs = (line.split() for line in (folder / name).read_text().splitlines())
                counts |= {key: int(value) for key, value in pairs}
        if not counts.get("oom_kill"):
            return None
        for folder in self.folders:
            with contextlib.suppress(OSError):  # version 1, where `oom_kill` also counts the machine's lack of memory
                most, limit = (int((folder / f"memory.{name}_in_bytes").read_text()) for name in ("max_usage", "limit"))
                counts["oom"] = int(most > limit - MEMORY_SLACK_BYTES)
        return "own" if counts.get("oom", 1) else "host"

    @property
    def shares_cpu(self) -> bool:
        """Whether its CPU time is scheduled apart from that of other groups."""
        names = itertools.product(self.folders, DEFAULT_CPU_WEIGHTS)
        return any((folder / name).exists() for folder, name in names)

    def cpu_time_s(self) -> float | None:
        """CPU time used by its processes; None if the kernel does not count it, or the group is gone."""
        for folder in self.folders:
            with contextlib.suppress(OSError):
                return int((folder / "cpuacct.usage").read_text()) / 1e9
            with contextlib.suppress(OSError):
                counts = dict(line.split() for line in (folder / "cpu.stat").read_text().splitlines())
                if "usage_usec" in counts:
                    return int(counts["usage_usec"]) / 1e6
        return None

    def weigh_cpu(self, part: float) -> None:
        """Sets its CPU weight as a fraction of the default of the other desktops."""
        for folder, (name, default) in itertools.product(self.folders, DEFAULT_CPU_WEIGHTS.items()):
            if (folder / name).exists():
                with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                    (folder / name).write_text(str(max(1, round(default * part))))

    async def remove(self, *, limit_s: float = REMOVE_LIMIT_S) -> tuple[Path, ...]:
        """Removes it once its processes are gone, which the kernel notices with a delay. Returns the folders that
        cannot be removed within the limit. Idempotent."""
        until = time.monotonic() + limit_s
        left = tuple(folder for folder in self.folders if not _remove(folder))
        while left and time.monotonic() < until:
            await asyncio.sleep(0.01)
            left = tuple(folder for folder in left if not _remove(folder))
        return left


class Bounds:
    """Makes groups if the machine allows it. `open` finds that out; `close` removes remaining groups."""

    def __init__(
        self,
        limits: DesktopLimits,
        *,
        version: int,
        bases: tuple[Path, ...],
        cpu_bases: tuple[Path, ...] = (),
        why_not: str = "",
        prefix: str = "",
    ) -> None:
        """`cpu_bases`: folders where CPU time is shared and counted; in version 2 the same as `bases`, or empty without
        the controller."""
        self._limits, self._version, self._bases, self._why_not = limits, version, bases, why_not
        self._cpu_bases = cpu_bases
        self._prefix = prefix or f"{_PREFIX}{os.getpid()}-{os.urandom(3).hex()}-"
        self._count = itertools.count()
        self._janitor: subprocess.Popen[bytes] | None = None

    @classmethod
    def open(cls, limits: DesktopLimits, *, proc: Path = Path("/proc/self")) -> Self:
        """Makes a group and removes it again as a test; groups of dead servers are removed, too."""
        reasons = []
        for version, bases, cpu_bases in _candidates(proc):
            bounds = cls(limits, version=version, bases=bases, cpu_bases=cpu_bases)
            try:
                group = bounds._make()
            except OSError as error:
                reasons.append(f"{error.filename or bases[0]}: {error.strerror}")
                continue
            for folder in group.folders:
                _remove(folder)
            bounds._sweep()
            bounds._start_janitor()
            return bounds
        return cls(limits, version=0, bases=(), why_not=reasons[0] if reasons else "no control groups are mounted")

    @property
    def has_groups(self) -> bool:
        return bool(self._bases)

    @property
    def shares_cpu(self) -> bool:
        """Whether CPU time is shared between desktops instead of between their programs."""
        return bool(self._cpu_bases)

    @property
    def description(self) -> str:
        """The limits that are in force, as text."""
        limits = self._limits
        if not self._bases:
            return f"limits per process only, no control group can be made ({self._why_not})"
        memory = f"{limits.memory_bytes >> 20} MiB of memory"
        cpu = ", an equal share of CPU time" if self.shares_cpu else ""
        quota = f", at most {limits.max_cpus:g} CPUs" if self.shares_cpu and limits.max_cpus is not None else ""
        return f"control group v{self._version}: {memory}, {limits.num_processes} processes{cpu}{quota}"

    def make_group(self) -> Group | None:
        """A group for one desktop; None if this machine has no control groups.

        Raises:
            ReplicaError: none can be made now. A desktop without one would have no limits.
        """
        if not self._bases:
            return None
        try:
            return self._make()
        except OSError as error:
            raise ReplicaError(f"no control group can be made for a desktop ({error})") from error

    def close(self) -> None:
        """Idempotent; call it after the last group is removed."""
        janitor, self._janitor = self._janitor, None
        if janitor is None:
            return
        assert janitor.stdin is not None
        janitor.stdin.close()
        try:
            janitor.wait(REMOVE_LIMIT_S + 1.0)
        except subprocess.TimeoutExpired:
            janitor.kill()
            janitor.wait()

    def _make(self) -> Group:
        name = f"{self._prefix}{next(self._count)}"
        folders: list[Path] = []
        try:
            for base, settings in self._settings().items():
                (base / name).mkdir()
                folders.append(base / name)
                for file, value in settings.items():
                    (base / name / file).write_text(value)
        except OSError:
            for folder in folders:
                _remove(folder)
            raise
        for folder, (file, value) in zip(folders, self._swap_settings(), strict=False):
            if (folder / file).exists():
                with contextlib.suppress(OSError):  # a kernel without swap accounting may still have the file
                    (folder / file).write_text(value)
        return Group(tuple(folders))

    def _settings(self) -> dict[Path, dict[str, str]]:
        """The files of each hierarchy with their values."""
        memory, num_processes = str(self._limits.memory_bytes), str(self._limits.num_processes)
        if self._version == 2:
            each = ({"memory.max": memory, "pids.max": num_processes},)
        else:
            each = ({"memory.limit_in_bytes": memory}, {"pids.max": num_processes})
        settings = dict(zip(self._bases, each, strict=True))
        for base in self._cpu_bases:
            settings.setdefault(base, {})
        if self._cpu_bases and self._limits.max_cpus is not None:
            quota_us = str(round(self._limits.max_cpus * CPU_PERIOD_US))
            settings[self._cpu_bases[0]] |= (
                {"cpu.max": f"{quota_us} {CPU_PERIOD_US}"}
                if self._version == 2
                else {"cpu.cfs_period_us": str(CPU_PERIOD_US), "cpu.cfs_quota_us": quota_us}
            )
        return settings

    def _swap_settings(self) -> tuple[tuple[str, str], ...]:
        """No swap beyond the memory."""
        if self._version == 2:
            return (("memory.swap.max", "0"),)
        return (("memory.memsw.limit_in_bytes", str(self._limits.memory_bytes)),)

    def _sweep(self) -> None:
        for base in self._settings():
            for folder in base.glob(f"{_PREFIX}*"):
                owner = folder.name.removeprefix(_PREFIX).partition("-")[0]
                if owner.isdigit() and not Path(f"/proc/{owner}").exists():
                    _remove(folder)

    def _start_janitor(self) -> None:
        self._janitor = subprocess.Popen(
            ["/bin/sh", "-c", _JANITOR, "sh", self._prefix, *map(str, self._settings())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )


def _candidates(proc: Path) -> list[tuple[int, tuple[Path, ...], tuple[Path, ...]]]:
    """Folders below which a desktop's group could be made, the best first: version, one folder per hierarchy, and
    those of CPU time."""
    try:
        lines = [line.split(":", 2) for line in (proc / "cgroup").read_text().splitlines()]
        mounts = [line.split() for line in (proc / "mountinfo").read_text().splitlines()]
    except OSError:
        return []
    own_path = {name: path for _, names, path in lines for name in names.split(",")}
    memory, pids = (_find(mounts, "cgroup", own_path.get(name), name) for name in _CONTROLLERS)
    cpu, cpuacct = (_find(mounts, "cgroup", own_path.get(name), name) for name in _CPU_CONTROLLERS)
    found: list[tuple[int, tuple[Path, ...], tuple[Path, ...]]] = []
    own = _find(mounts, "cgroup2", own_path.get(""), None)
    if own is not None:
        for folder in (own, own.parent):
            if _hands_down(folder):
                found.append((2, (folder,), (folder,) if "cpu" in _handed_down(folder) else ()))
    if memory is not None and pids is not None:
        if cpu is not None and cpuacct is not None:
            found.append((1, (memory, pids), tuple(dict.fromkeys((cpu, cpuacct)))))
        found.append((1, (memory, pids), ()))
    return found


def _find(mounts: list[list[str]], kind: str, path: str | None, controller: str | None) -> Path | None:
    """The folder of the group `path` of a hierarchy; None if it is not mounted."""
    for fields in mounts:
        separator = fields.index("-")
        options = fields[separator + 3].split(",")
        if path is None or fields[separator + 1] != kind or (controller is not None and controller not in options):
            continue
        root, mount = fields[3], Path(fields[4])
        if root == "/":
            return mount / path.lstrip("/")
        if path == root or path.startswith(f"{root}/"):
            return mount / path[len(root) :].lstrip("/")
        if path == "/":  # a cgroup namespace: the mounted hierarchy is ours
            return mount
    return None


def _hands_down(folder: Path) -> bool:
    """Whether child groups have the controllers. Version 2 allows that only in a group without processes, so a server
    that is alone in its group (as under systemd with Delegate=yes) moves into a child group."""
    control = folder / "cgroup.subtree_control"
    try:
        if not set(_CONTROLLERS) <= _handed_down(folder):
            if not set(_CONTROLLERS) <= _controllers(folder):
                return False
            if (folder / "cgroup.procs").read_text().split() == [str(os.getpid())]:
                own = folder / "env-server"
                own.mkdir(exist_ok=True)
                (own / "cgroup.procs").write_text("0")
            control.write_text("+memory +pids")
    except OSError:
        return False
    with contextlib.suppress(OSError):  # refused, for example, if there are real-time processes
        if "cpu" in _controllers(folder) - _handed_down(folder):
            control.write_text("+cpu")
    return True


def _controllers(folder: Path) -> set[str]:
    return set((folder / "cgroup.controllers").read_text().split())


def _handed_down(folder: Path) -> set[str]:
    return set((folder / "cgroup.subtree_control").read_text().split())


def _remove(folder: Path) -> bool:
    """Whether it is gone."""
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
