"""The `local` provider on real 1920x1080 desktops with windows on them: reset, steps by picture format, eight desktops
at once, and the cost of each encoding."""

import asyncio
import base64
import json
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console

from benchmarks.encodings import run_encodings
from benchmarks.load import Connection
from benchmarks.processes import memory_mb, processes_below, started, wait_for_ready_file
from benchmarks.spread import Spread, print_table, verdict
from env_server.protocols import ProvidedDesktop
from env_server.providers.local.provider import LocalProvider

SCREEN = (1920, 1080)
NUM_CROWD = 8
RESETS_A_ROUND, STEPS_A_ROUND, CROWD_RESETS_A_ROUND = 8, 25, 2
MAX_RESET_P50_S, MAX_RESET_P95_S, MAX_JPEG_MS, MAX_PNG_MS, MAX_DESKTOP_MB = 0.5, 1.0, 40.0, 80.0, 250.0
WINDOWS: list[dict[str, Any]] = [
    {"type": "launch", "parameters": {"command": ["xterm", "-T", "Work", "-geometry", "90x24+40+60"]}},
    {"type": "launch", "parameters": {"command": ["pcmanfm", "/usr/share"]}},
    {"type": "launch", "parameters": {"command": ["mousepad", "/usr/share/common-licenses/GPL-3"]}},
    {"type": "sleep", "parameters": {"seconds": 1.5}},
]
TASK: dict[str, Any] = {"id": "bench", "instruction": "Type.", "evaluator": {"func": "infeasible"}}
FORMATS: tuple[tuple[str, int | None], ...] = (("png", None), ("jpeg", 85), ("jpeg", None), ("webp", 80))


@dataclass(frozen=True, kw_only=True)
class Opened:
    """An episode and its connection."""

    connection: Connection
    episode_id: str

    async def step(self, number: int, *, is_binary: bool = False) -> bytes:
        """Move the mouse and observe at once; returns the answer's body, in which the picture is base64 or bytes."""
        action = f"pyautogui.moveTo({200 + number * 37 % 1200}, {150 + number * 53 % 700})"
        body: dict[str, Any] = {"action": action, "pause": 0, "step": number}
        if is_binary:
            path = f"/v1/episodes/{self.episode_id}/steps"
            return await self.connection.post(path, json.dumps(body).encode(), accept="multipart/mixed")
        return await self.connection.post("/step", json.dumps({**body, "episode_id": self.episode_id}).encode())

    async def close(self) -> None:
        await self.connection.post("/close", json.dumps({"episode_id": self.episode_id}).encode())


@contextmanager
def env_server(state_dir: Path, num_replicas: int) -> Iterator[tuple[str, int]]:
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        ready = Path(folder) / "ready.json"
        command = [
            sys.executable, "-m", "env_server.main", "--provider", "local", "--replicas", str(num_replicas),
            "--port", "0", "--screen-size", f"{SCREEN[0]}x{SCREEN[1]}", "--state-dir", str(state_dir),
            "--ready-file", str(ready),
        ]  # fmt: skip
        with started(command) as program:
            yield wait_for_ready_file(ready, program), program.process.pid


async def open_episode(url: str, image_format: str, quality: int | None, *, with_windows: bool = True) -> Opened:
    parts = urlsplit(url)
    connection = Connection(str(parts.hostname), int(parts.port or 80))
    env_config = {"image_format": image_format, "image_quality": quality, "require_a11y_tree": False}
    body = {"task_config": {**TASK, "config": WINDOWS if with_windows else []}, "env_config": env_config}
    answer = json.loads(await connection.post("/reset", json.dumps(body).encode()))
    return Opened(connection=connection, episode_id=answer["episode_id"])


def run_local(console: Console, *, rounds: int, state_dir: Path) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = []
    alone = asyncio.run(_with_desktop(state_dir, lambda desktop: time_resets(desktop, rounds * RESETS_A_ROUND)))
    results.append(_figure("reset of one desktop", "s", alone))
    with env_server(state_dir, 1) as (url, _):
        steps = {
            (image_format, quality): asyncio.run(time_steps(url, image_format, quality, rounds * STEPS_A_ROUND))
            for image_format, quality in FORMATS
        }
    for (image_format, quality), timed in steps.items():
        name = f"step, {named(image_format, quality)}"
        results.append({**_figure(name, "ms", timed.step_ms), "bytes": timed.num_bytes})
        results.append(_figure(f"{name}, binary", "ms", timed.binary_ms))
    crowd = measure_crowd(state_dir, rounds)
    results += crowd.results()
    _print_local(console, alone, steps, crowd, rounds)
    results += asyncio.run(_with_desktop(state_dir, lambda desktop: run_encodings(console, desktop, WINDOWS, SCREEN)))
    return results


async def _with_desktop(state_dir: Path, use: Callable[[ProvidedDesktop], Awaitable[Any]]) -> Any:
    provider = LocalProvider(images=state_dir, screen_size=SCREEN)
    try:
        return await use(await provider.start("bench"))
    finally:
        await provider.close()


async def time_resets(desktop: ProvidedDesktop, count: int) -> Spread:
    """Seconds from discarding a desktop to the first screenshot of the next."""
    times_s = []
    for _ in range(count):
        start = time.perf_counter()
        await desktop.reset()
        times_s.append(time.perf_counter() - start)
    return Spread.of(times_s)


@dataclass(frozen=True, kw_only=True)
class Steps:
    step_ms: Spread
    """Time from the request's first byte to the answer's last, through the env server."""
    binary_ms: Spread
    """The same with the picture as bytes (multipart), in turns with the above."""
    base64_ms: Spread
    """Time of a client to parse the JSON and the base64 of the first."""
    num_bytes: int
    """Size of the picture."""


async def time_steps(url: str, image_format: str, quality: int | None, count: int) -> Steps:
    episode = await open_episode(url, image_format, quality)
    step_ms, binary_ms, base64_ms, picture = [], [], [], b""
    for number in range(1, 2 * count, 2):
        start = time.perf_counter()
        answer = await episode.step(number)
        step_ms.append((time.perf_counter() - start) * 1e3)
        start = time.perf_counter()
        picture = base64.b64decode(json.loads(answer)["screenshot_base64"])
        base64_ms.append((time.perf_counter() - start) * 1e3)
        start = time.perf_counter()
        await episode.step(number + 1, is_binary=True)
        binary_ms.append((time.perf_counter() - start) * 1e3)
    await episode.close()
    return Steps(
        step_ms=Spread.of(step_ms),
        binary_ms=Spread.of(binary_ms),
        base64_ms=Spread.of(base64_ms),
        num_bytes=len(picture),
    )


@dataclass(frozen=True, kw_only=True)
class Crowd:
    """Eight desktops at once, all in use."""

    desktop_mb: Spread
    step_ms: Spread
    reopen_s: Spread
    """Time from closing an episode to the next one's first screenshot, all eight at the same moment."""

    def results(self) -> list[dict[str, Any]]:
        return [
            _figure(f"memory of each of {NUM_CROWD} desktops (PSS)", "MB", self.desktop_mb),
            _figure(f"step, jpeg q85, {NUM_CROWD} episodes at once", "ms", self.step_ms),
            _figure(f"close and reset, {NUM_CROWD} episodes at once", "s", self.reopen_s),
        ]


def measure_crowd(state_dir: Path, rounds: int) -> Crowd:
    with env_server(state_dir, NUM_CROWD) as (url, pid):
        return asyncio.run(_drive_crowd(url, pid, rounds))


async def _drive_crowd(url: str, server_pid: int, rounds: int) -> Crowd:
    step_ms: list[float] = []
    reopen_s: list[float] = []

    async def use(episode: Opened) -> None:
        for number in range(1, STEPS_A_ROUND * rounds // 2 + 1):
            start = time.perf_counter()
            await episode.step(number)
            step_ms.append((time.perf_counter() - start) * 1e3)

    async def reopen(episode: Opened) -> None:
        for _ in range(CROWD_RESETS_A_ROUND * rounds):
            start = time.perf_counter()
            await episode.close()
            episode = await open_episode(url, "jpeg", 85, with_windows=False)
            reopen_s.append(time.perf_counter() - start)
        await episode.close()

    episodes = await asyncio.gather(*(open_episode(url, "jpeg", 85) for _ in range(NUM_CROWD)))
    await asyncio.gather(*(use(episode) for episode in episodes))
    desktop_mb = Spread.of(memories_mb(server_pid))
    await asyncio.gather(*(reopen(episode) for episode in episodes))
    return Crowd(desktop_mb=desktop_mb, step_ms=Spread.of(step_ms), reopen_s=Spread.of(reopen_s))


def memories_mb(server_pid: int) -> list[float]:
    """PSS of each desktop of a server, with all its processes."""
    children = Path(f"/proc/{server_pid}/task/{server_pid}/children").read_text().split()
    sizes = [memory_mb({int(child), *processes_below(int(child))})["pss"] for child in children]
    return [size for size in sizes if size > 20]  # smaller ones are helpers of the server


def named(image_format: str, quality: int | None) -> str:
    return image_format if quality is None else f"{image_format} q{quality}"


def _figure(name: str, unit: str, spread: Spread) -> dict[str, Any]:
    return {"bench": "local", "figure": name, "unit": unit, **spread.fields()}


def _print_local(
    console: Console, alone: Spread, steps: dict[tuple[str, int | None], Steps], crowd: Crowd, rounds: int
) -> None:
    is_quick = alone.median <= MAX_RESET_P50_S and alone.quantile(0.95) <= MAX_RESET_P95_S
    target = f"p50 {MAX_RESET_P50_S:g} s, p95 {MAX_RESET_P95_S:g} s: {verdict(is_quick)}"
    rows: list[Sequence[str]] = [_row("reset of one desktop, s", alone, 2, target)]
    for (image_format, quality), timed in steps.items():
        limit = {"jpeg": MAX_JPEG_MS, "png": MAX_PNG_MS}.get(image_format)
        text = "" if limit is None else f"p50 {limit:g} ms: {verdict(timed.step_ms.median <= limit)}"
        text += f" ({timed.num_bytes / 1e3:.0f} kB; as bytes p50 {timed.binary_ms.median:.1f}; "
        text += f"its base64 costs a client {timed.base64_ms.median:.1f})"
        rows.append(_row(f"step as {named(image_format, quality)}, pause 0, ms", timed.step_ms, 1, text.strip()))
    is_small = crowd.desktop_mb.values[-1] <= MAX_DESKTOP_MB
    rows += [
        _row(
            f"memory of each of {NUM_CROWD}, MB (PSS)",
            crowd.desktop_mb, 0, f"each {MAX_DESKTOP_MB:g} MB: {verdict(is_small)}",
        ),
        _row(f"step as jpeg q85, {NUM_CROWD} episodes at once, ms", crowd.step_ms, 1, "as the cores allow"),
        _row(f"close and reset, {NUM_CROWD} at the same moment, s", crowd.reopen_s, 2, "as the cores allow"),
    ]  # fmt: skip
    title = (
        f"local, {SCREEN[0]}x{SCREEN[1]}, three windows, {rounds} rounds; limited by the CPU (Xvfb, encoding, programs)"
    )
    print_table(console, title, ("figure", "n", "p50 [p25..p75]", "p95", "at most"), rows)


def _row(name: str, spread: Spread, digits: int, note: str) -> tuple[str, ...]:
    return (
        name,
        str(len(spread.values)),
        spread.quartile_text(digits),
        f"{spread.quantile(0.95):.{digits}f}",
        note,
    )
