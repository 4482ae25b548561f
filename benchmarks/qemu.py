"""The `qemu` provider: time from a restore to the first screenshot, against a cold boot of the same image, and the
memory and disk of each replica. The accelerator is named with every figure."""

import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.processes import memory_mb
from benchmarks.spread import Spread, print_table, verdict
from env_server.guest_client import GuestClient
from env_server.providers.qemu.command import MachineSpec
from env_server.providers.qemu.images import OwnImage
from env_server.providers.qemu.machine import Machine
from env_server.providers.qemu.provider import QemuDesktop, QemuProvider
from env_server.providers.qemu.saved_state import ensure_state
from env_server.providers.qemu.walls import Walls
from osworld_pipeline.errors import DependencyError, ReplicaError

SCREEN = (1280, 720)
NUM_REPLICAS = 3
RESTORES_A_ROUND = 6
BOOT_LIMIT_S = 300.0
USE_S = 10.0
"""Time for programs to start under emulation."""
MAX_RESTORE_S, MAX_MEMORY_MB, MAX_DISK_MB = 1.2, 300.0, 30.0


def run_qemu(console: Console, *, rounds: int, state_dir: Path) -> list[dict[str, Any]]:
    try:
        return asyncio.run(_measure(console, rounds, state_dir.absolute()))
    except DependencyError as error:
        console.print(f"qemu: not measured, because {error}")
        return [{"bench": "qemu", "skipped": str(error)}]


async def _measure(console: Console, rounds: int, state_dir: Path) -> list[dict[str, Any]]:
    provider = QemuProvider(images=state_dir, screen_size=SCREEN)
    try:
        start = time.perf_counter()
        desktops = [await provider.start("bench-0")]
        prepared_s = time.perf_counter() - start
        console.print(
            f"qemu under {provider.accelerator}: first desktop after {prepared_s:.1f} s, image and state included"
        )
        boot_s = [await cold_boot_s(state_dir) for _ in range(rounds)]
        restore_s = await _time_restores(desktops[0], rounds * RESTORES_A_ROUND)
        desktops += [await provider.start(f"bench-{index}") for index in range(1, NUM_REPLICAS)]
        await asyncio.gather(*(_use(desktop) for desktop in desktops))
        sizes = [_sizes(desktop) for desktop in desktops]
        accelerator = str(provider.accelerator)
    finally:
        await provider.close()
    figures = {
        "first screenshot after a restore, s": Spread.of(restore_s),
        "first screenshot after a cold boot, s (baseline)": Spread.of(boot_s),
        "ratio, cold boot to restore": Spread.of(boot / Spread.of(restore_s).median for boot in boot_s),
        "memory of each with two windows, MB (PSS)": Spread.of(size["pss"] for size in sizes),
        "of it its own, MB (anonymous)": Spread.of(size["anonymous"] for size in sizes),
        "disk of each replica, MB": Spread.of(size["disk"] for size in sizes),
    }
    _print_figures(console, figures, accelerator, rounds)
    return [
        {"bench": "qemu", "accelerator": accelerator, "figure": name, **spread.fields()}
        for name, spread in figures.items()
    ]


async def _time_restores(desktop: QemuDesktop, count: int) -> list[float]:
    """Seconds from discarding the machine to the first screenshot of the next."""
    times_s = []
    for _ in range(count):
        start = time.perf_counter()
        await desktop.reset()
        times_s.append(time.perf_counter() - start)
    return times_s


class _Booted(Exception):
    """The baseline's machine has shown its screen and is no longer needed."""


async def cold_boot_s(state_dir: Path) -> float:
    """Seconds from starting a machine without a saved state to its first screenshot, as in the provider's own boot."""
    digest, spec = await OwnImage().prepare(state_dir, accelerator="auto", screen_size=SCREEN)
    start = time.perf_counter()

    async def shows_itself(machine: Machine) -> None:
        async with asyncio.timeout(BOOT_LIMIT_S):
            await _first_screenshot(machine)
        raise _Booted

    try:
        await _boot(state_dir, digest, spec, shows_itself)
    except _Booted:
        return time.perf_counter() - start
    raise AssertionError("ensure_state calls is_ready before it returns")


async def _boot(state_dir: Path, digest: str, spec: MachineSpec, is_ready: Any) -> None:
    # Next to the images, because a disk refers to its base image; the folder is removed with the machine.
    walls = await asyncio.to_thread(Walls.open, memory_mb=spec.memory_mb)
    try:
        with tempfile.TemporaryDirectory(prefix=".bench-", dir=state_dir) as folder:
            await ensure_state(Path(folder), f"bench-{digest}", spec, walls=walls, is_ready=is_ready)
    finally:
        await walls.close()


async def _first_screenshot(machine: Machine) -> None:
    guest = GuestClient.over_unix_socket(machine.guest_socket, name=machine.name)
    try:
        while True:
            try:
                await guest.screenshot(timeout_s=5.0)
                return
            except ReplicaError:
                await asyncio.sleep(0.05)
    finally:
        await guest.close()


async def _use(desktop: QemuDesktop) -> None:
    """Open two windows, so that memory is measured for a desktop in use."""
    await desktop.guest.launch(["xterm"])
    await desktop.guest.launch(["mousepad"])
    await asyncio.sleep(USE_S)
    await desktop.guest.screenshot()


def _sizes(desktop: QemuDesktop) -> dict[str, float]:
    pid = desktop.machine.pid
    assert pid is not None, "it runs"
    return {**memory_mb({pid}), "disk": desktop.machine.overlay_bytes() / 1e6}


def _print_figures(console: Console, figures: dict[str, Spread], accelerator: str, rounds: int) -> None:
    limits = {
        "first screenshot after a restore, s": MAX_RESTORE_S,
        "memory of each with two windows, MB (PSS)": MAX_MEMORY_MB,
        "disk of each replica, MB": MAX_DISK_MB,
    }
    rows = []
    for name, spread in figures.items():
        limit = limits.get(name)
        judged = "" if limit is None else f"p50 {limit:g}: {verdict(spread.median <= limit)}"
        rows.append((name, str(len(spread.values)), spread.quartile_text(2), f"{spread.quantile(0.95):.2f}", judged))
    what = "the guest's one emulated core" if accelerator == "tcg" else "the copying of touched memory"
    title = f"qemu under {accelerator}, {SCREEN[0]}x{SCREEN[1]}, {NUM_REPLICAS} replicas, {rounds} rounds; limited by "
    title += what
    print_table(console, title, ("figure", "n", "p50 [p25..p75]", "p95", "at most"), rows)
