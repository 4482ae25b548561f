"""What it costs when all desktops are watched on /status: CPU time of the server and its desktops with and without
a watcher, while nothing moves and while every screen changes several times a second."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from benchmarks.local import TASK, env_server
from benchmarks.processes import cpu_s, processes_below
from benchmarks.spread import Spread, print_table, verdict

NUM_DESKTOPS = 32
WINDOW_S = 10.0
GOAL = 0.25
"""Share of one core, for 32 desktops at two frames a second."""
MIN_FRAMES_PER_S = 0.95 * 2 * NUM_DESKTOPS
"""Of moving desktops; with fewer frames, the CPU time is that of less work."""
MOVING = {"type": "launch", "parameters": {"command": [
    "xterm", "-geometry", "100x40+300+200", "-e", "bash", "-c", "while sleep 0.3; do date +%N; done"
]}}  # fmt: skip


def run_watching(console: Console, *, rounds: int, state_dir: Path) -> list[dict[str, Any]]:
    results, rows = list[dict[str, Any]](), []
    with env_server(state_dir, NUM_DESKTOPS) as (url, pid):
        for name, config in (("idle desktops", []), ("moving desktops", [MOVING])):
            shares, frames = asyncio.run(_measure(url, pid, config, rounds))
            figure = f"CPU of watching {NUM_DESKTOPS} {name}"
            results.append({"bench": "watching", "figure": figure, "unit": "cores", **shares.fields()})
            is_complete = not config or frames.median >= MIN_FRAMES_PER_S
            met = verdict(shares.median <= GOAL and is_complete)
            rows.append((figure, f"{shares.range_text(3)} cores", f"{frames.median:.1f} frames/s", met))
    print_table(console, f"goal: {GOAL:g} cores", ("figure", "CPU", "in all", "goal"), rows)
    return results


async def _measure(url: str, pid: int, config: Sequence[Any], rounds: int) -> tuple[Spread, Spread]:
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        bodies = [{"task_config": {**TASK, "config": list(config)}} for _ in range(NUM_DESKTOPS)]
        answers = [(await http.post("/reset", json=body)).raise_for_status().json() for body in bodies]
        ids = [answer["replica_id"] for answer in answers]
        await asyncio.sleep(3)
        shares, frames = list[float](), list[float]()
        for _ in range(rounds):
            before = await _cpu_share(pid)
            watching = asyncio.create_task(_watch(http, ids))
            await asyncio.sleep(2)
            shares.append(await _cpu_share(pid) - before)
            watching.cancel()
            frames.append(await watching / (WINDOW_S + 2))
        for answer in answers:
            await http.post("/close", json={"episode_id": answer["episode_id"]})
    return Spread.of(shares), Spread.of(frames)


async def _watch(http: httpx.AsyncClient, ids: Sequence[str]) -> int:
    """Reads the stream until it is cancelled; returns the number of frames."""
    num_frames, held = 0, b""
    try:
        async with http.stream("GET", "/status/live", params={"replica": list(ids), "width": 480}) as answer:
            async for part in answer.aiter_bytes():
                held += part
                while len(held) >= 4 and len(held) >= (start := 4 + int.from_bytes(held[:4], "big")):
                    size = json.loads(held[4:start])["size"]
                    if len(held) < start + size:
                        break
                    held, num_frames = held[start + size :], num_frames + 1
    except asyncio.CancelledError:
        pass
    return num_frames


async def _cpu_share(pid: int) -> float:
    """CPU seconds per second of a process and all below it."""
    before = _cpu_of(pid)
    await asyncio.sleep(WINDOW_S)
    after = _cpu_of(pid)
    return sum(after[one] - before.get(one, 0.0) for one in after) / WINDOW_S


def _cpu_of(pid: int) -> dict[int, float]:
    found = dict[int, float]()
    for one in {pid} | processes_below(pid):
        try:
            found[one] = cpu_s(one)
        except OSError:
            continue
    return found
