"""Overhead of a turn in addition to desktop and model: the screenshot, the prompt, parsing, signals, storing."""

import asyncio
import itertools
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.rollout_stub import (
    STUB_SAMPLING,
    TimedDesktop,
    TimedEngine,
    draw_screens,
    stub_renderer,
    stub_settings,
    stub_tasks,
)
from benchmarks.spread import Spread, print_table, verdict
from osworld_pipeline.agent.images import fit_size
from osworld_pipeline.agent.renderer import Renderer
from osworld_pipeline.dialects import load_dialect
from osworld_pipeline.domain.episode import EpisodePurpose
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.recipes.schema import AgentSection
from osworld_pipeline.rollout.run_episode import EpisodePlan, EpisodeTools, run_episode
from osworld_pipeline.store import TrajectoryStore

BAR_MS = 10.0
MODEL_S = 0.25
"""Time of the model; part of a turn's other work runs during it."""
NUM_TURNS = 20
SIZES = ((1280, 720), (1920, 1080))
"""The model sees 1280x704 and 1312x736 of them."""


def run_turns(console: Console, *, rounds: int) -> list[dict[str, Any]]:
    """Print the overhead of a turn; returns its figures."""
    rows: list[list[str]] = []
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="bench-rollout-") as scratch:
        renderer = stub_renderer(Path(scratch) / "tiny")
        for (width, height), is_resized in itertools.product(SIZES, (True, False)):
            fitted = fit_size(width, height, AgentSection().max_pixels)
            screens = draw_screens(*(fitted if is_resized else (width, height)), NUM_TURNS)
            desktop = partial(TimedDesktop, screens, screen_size=(width, height) if is_resized else None)
            state = StateDir(Path(scratch) / f"{width}x{height}-{is_resized}")
            overheads = [
                overhead
                for number in range(rounds)
                for overhead in asyncio.run(_episode(state, renderer, desktop, number))
            ]
            spread = Spread.of(overhead * 1000 for overhead in overheads)
            p95 = spread.quantile(0.95)
            met = verdict(spread.median <= BAR_MS)
            kilobytes = sum(map(len, screens)) / len(screens) / 1000
            sender = "ours: of the model's size" if is_resized else "another: of the screen's size"
            size = f"{width}x{height}"
            rows.append([size, f"{sender}, {kilobytes:.0f} KB", spread.quartile_text(), f"{p95:.1f}", met])
            results.append({"bench": "turns", "screen": size, "sent": sender, "overhead_ms": spread.fields()})
    title = f"Overhead of a turn, ms: all but desktop and model ({NUM_TURNS} turns, append context)"
    columns = ("screen", "env server, its PNG", "p50 [p25..p75]", "p95", f"bar p50 <= {BAR_MS:g} ms")
    print_table(console, title, columns, rows)
    console.print("Screenshots of other env servers are decoded, resized and encoded before the model sees them.")
    return results


class _StampedEngine(TimedEngine):
    """Records the start and end of each turn's model call."""

    def __init__(self, text: str, token_ids: Sequence[int]) -> None:
        super().__init__(text, token_ids, latency_s=MODEL_S)
        self.began: list[float] = []
        self.ended: list[float] = []

    async def generate(self, request: Any) -> Any:
        self.began.append(time.perf_counter())
        result = await super().generate(request)
        self.ended.append(time.perf_counter())
        return result


async def _episode(
    state: StateDir, renderer: Renderer, desktop: Callable[[], TimedDesktop], number: int
) -> list[float]:
    """Seconds between the end of one turn's model call and the start of the next; the desktop takes no time."""
    text = load_dialect("slime").format("Wait", {"action": "wait", "time": 1})
    engine = _StampedEngine(text, renderer.encode(text))
    tools = EpisodeTools(desktop_factory=desktop, engine=engine, renderer=renderer, sink=TrajectoryStore(state))
    settings = stub_settings(NUM_TURNS)
    plan = EpisodePlan(
        episode_id=f"e{number}", purpose=EpisodePurpose.TRAIN, checkpoint_id="stub", sampling=STUB_SAMPLING
    )
    episode = await run_episode(stub_tasks(1)[0], plan, tools=tools, settings=settings)
    assert len(episode.steps) == NUM_TURNS, episode.error
    return [began - ended for ended, began in zip(engine.ended, engine.began[1:], strict=False)]
