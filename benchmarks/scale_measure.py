"""Measured resources of a replica on this machine: time to provision, memory, disk, CPU when idle and in use, and
trajectories a minute with a policy that answers at once."""

import asyncio
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.local import SCREEN, TASK, Opened, env_server, memories_mb, open_episode
from benchmarks.processes import BenchmarkError, processes_below
from benchmarks.qemu import SCREEN as QEMU_SCREEN
from benchmarks.qemu import run_qemu
from benchmarks.spread import Spread, print_table
from env_server.providers.base_image import ensure_image, image_digest
from env_server.providers.local.provider import LocalProvider
from env_server.providers.qemu.images import OwnImage
from osworld_pipeline.errors import DependencyError

STEPS_A_TRAJECTORY = 5
LOOK_S = 0.25
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, kw_only=True)
class Provisioning:
    """Figures of desktops that start one after the other."""

    start_s: Spread
    """Start time, with an existing image."""
    reset_s: Spread
    image_mb: float
    """Size on disk, once for all replicas."""
    own_disk_mb: float
    """Additional disk of each replica."""


@dataclass(frozen=True, kw_only=True)
class Level:
    """A number of replicas, all in use by a policy that answers at once."""

    num_replicas: int
    ready_s: float
    """Time from starting the server until all are warm."""
    memory_mb: Spread
    """PSS of each with its windows."""
    idle_cores: float
    """Cores of each when idle."""
    cpu_s_per_trajectory: float
    episode_s: Spread
    trajectories_per_min: float

    @property
    def cpu_s_per_step(self) -> float:
        return self.cpu_s_per_trajectory / STEPS_A_TRAJECTORY

    def cores_at(self, step_period_s: float) -> float:
        """Cores of a replica whose policy acts with this period; the reset is included in the steps."""
        return self.idle_cores + self.cpu_s_per_step / step_period_s


def measure_provisioning(state_dir: Path, count: int) -> Provisioning:
    return asyncio.run(_provision(state_dir, count))


async def _provision(state_dir: Path, count: int) -> Provisioning:
    start_s, reset_s = [], []
    image = await asyncio.to_thread(ensure_image, state_dir, image_digest())
    provider = LocalProvider(images=state_dir, screen_size=SCREEN)
    with _own_temporary_folder() as folder:
        try:
            await provider.start("scale-first")  # probes the machine's capabilities
            before_mb = tree_mb(folder)
            desktops = []
            for number in range(count):
                started = time.perf_counter()
                desktops.append(await provider.start(f"scale-{number}"))
                start_s.append(time.perf_counter() - started)
            own_mb = max(0.0, tree_mb(folder) - before_mb) / count
            for desktop in desktops:
                started = time.perf_counter()
                await desktop.reset()
                reset_s.append(time.perf_counter() - started)
        finally:
            await provider.close()
    return Provisioning(
        start_s=Spread.of(start_s), reset_s=Spread.of(reset_s), image_mb=tree_mb(image), own_disk_mb=own_mb
    )


@contextmanager
def _own_temporary_folder() -> Iterator[Path]:
    """A temporary folder that contains only the files that desktops write during the block. Its name is short, as
    sockets require."""
    with tempfile.TemporaryDirectory(prefix="s-") as folder:
        earlier, tempfile.tempdir = tempfile.tempdir, folder
        try:
            yield Path(folder)
        finally:
            tempfile.tempdir = earlier


def measure_level(state_dir: Path, num_replicas: int, *, seconds: float) -> Level:
    started = time.perf_counter()
    with env_server(state_dir, num_replicas) as (url, pid):
        ready_s = time.perf_counter() - started
        return asyncio.run(_drive(url, pid, num_replicas, ready_s, seconds))


async def _drive(url: str, pid: int, num_replicas: int, ready_s: float, seconds: float) -> Level:
    cpu = TreeCpu(pid)
    watching = asyncio.create_task(cpu.watch())
    try:
        rest_from, rest_cpu_s = time.perf_counter(), cpu.look()
        await asyncio.sleep(min(5.0, seconds))
        idle_cores = (cpu.look() - rest_cpu_s) / (time.perf_counter() - rest_from) / num_replicas
        opened = await asyncio.gather(*(open_episode(url, "jpeg", 85) for _ in range(num_replicas)))
        memory = memories_mb(pid)
        await asyncio.gather(*(episode.close() for episode in opened))
        episode_s: list[float] = []
        began, cpu_s = time.perf_counter(), cpu.look()
        await asyncio.gather(*(_act_until(url, began + seconds, episode_s) for _ in range(num_replicas)))
        took_s, used_s = time.perf_counter() - began, cpu.look() - cpu_s
    finally:
        watching.cancel()
    if not memory or not episode_s or used_s <= 0:
        raise BenchmarkError(f"nothing could be measured of {num_replicas} desktops within {seconds:g} s")
    return Level(
        num_replicas=num_replicas,
        ready_s=ready_s,
        memory_mb=Spread.of(memory),
        idle_cores=idle_cores,
        cpu_s_per_trajectory=used_s / len(episode_s),
        episode_s=Spread.of(episode_s),
        trajectories_per_min=60.0 * len(episode_s) / took_s,
    )


async def _act_until(url: str, end: float, episode_s: list[float]) -> None:
    """Run whole trajectories, reset and grading included; at least one."""
    while True:
        started = time.perf_counter()
        episode = await open_episode(url, "jpeg", 85, with_windows=False)
        for number in range(1, STEPS_A_TRAJECTORY + 1):
            await episode.step(number)
        await _grade(episode)
        await episode.close()
        episode.connection.close()
        episode_s.append(time.perf_counter() - started)
        if time.perf_counter() >= end:
            return


async def _grade(episode: Opened) -> None:
    await episode.connection.post("/evaluate", json.dumps({"episode_id": episode.episode_id}).encode())


class TreeCpu:
    """CPU time of a process and its descendants. The CPU time of an ended process is lost, so this samples often: at
    most `LOOK_S` of each ended process is missed."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._ticks: dict[tuple[int, str], int] = {}
        """CPU ticks by process id and start time, because ids are reused."""

    def look(self) -> float:
        """User and system seconds so far, including ended processes."""
        for each in (self._pid, *processes_below(self._pid)):
            try:
                fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            self._ticks[each, fields[19]] = int(fields[11]) + int(fields[12])
        return sum(self._ticks.values()) / _TICKS_PER_S

    async def watch(self) -> None:
        """Sample until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(LOOK_S)


def tree_mb(folder: Path) -> float:
    """Disk that the files below a folder take, in MB of 10**6 bytes; what cannot be read is left out."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(path, name)).st_blocks * 512
            except OSError:
                continue
    return total / 1e6


@dataclass(frozen=True, kw_only=True)
class Machines:
    """Figures of the qemu provider."""

    start_s: Spread
    """First screenshot after a restore."""
    boot_s: Spread
    memory_mb: Spread
    image_mb: float
    own_disk_mb: float


def measure_qemu(console: Console, state_dir: Path, *, rounds: int) -> Machines | None:
    """Measure as `make bench-env` does; None if no machine runs, with a printed reason."""
    results = run_qemu(console, rounds=rounds, state_dir=state_dir)
    if "skipped" in results[0]:
        return None
    found = {result["figure"]: result for result in results}

    def spread(figure: str) -> Spread:
        return Spread.of(found[figure][name] for name in ("min", "p25", "p50", "p75", "max"))

    try:
        _, spec = asyncio.run(OwnImage().prepare(state_dir.absolute(), accelerator="auto", screen_size=QEMU_SCREEN))
    except DependencyError as error:
        raise BenchmarkError(f"the measured image is missing: {error}") from error
    return Machines(
        start_s=spread("first screenshot after a restore, s"),
        boot_s=spread("first screenshot after a cold boot, s (baseline)"),
        memory_mb=spread("memory of each with two windows, MB (PSS)"),
        image_mb=sum(os.stat(disk).st_blocks for disk in spec.disks) * 512 / 1e6,
        own_disk_mb=spread("disk of each replica, MB").median,
    )


def print_levels(console: Console, levels: Sequence[Level]) -> None:
    rows = [
        (
            str(level.num_replicas),
            f"{level.ready_s:.1f}",
            level.memory_mb.range_text(0),
            f"{1e3 / level.memory_mb.median:.1f}",
            f"{level.idle_cores:.3f}",
            f"{level.cpu_s_per_trajectory:.2f}",
            level.episode_s.quartile_text(2),
            f"{level.trajectories_per_min:.1f}",
        )
        for level in levels
    ]
    columns = (
        "replicas", "all warm, s", "memory of each, MB", "a GB holds", "idle cores each", "CPU s a trajectory",
        f"trajectory of {STEPS_A_TRAJECTORY} steps, s", "trajectories/min",
    )  # fmt: skip
    title = (
        f"local, {SCREEN[0]}x{SCREEN[1]}, a policy that answers at once (task {TASK['id']!r}, reset and grade in it)"
    )
    print_table(console, title, columns, rows)


def level_fields(level: Level) -> dict[str, Any]:
    return {
        "bench": "level",
        "replicas": level.num_replicas,
        "ready_s": round(level.ready_s, 3),
        "memory_mb": level.memory_mb.fields(),
        "idle_cores": round(level.idle_cores, 4),
        "cpu_s_per_trajectory": round(level.cpu_s_per_trajectory, 4),
        "episode_s": level.episode_s.fields(),
        "trajectories_per_min": round(level.trajectories_per_min, 2),
    }
