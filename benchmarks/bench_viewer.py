"""`python -m benchmarks.bench_viewer`: the trajectory viewer in Chromium, from a click or a key to the frame
that shows its effect: opening a demo's store, stepping through an episode, filtering 100,000 episodes."""

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright
from rich.console import Console

from benchmarks.processes import BenchmarkError
from benchmarks.spread import Spread, print_table, show_machine, verdict
from benchmarks.viewer_store import write_store
from osworld_pipeline.domain.state import StateDir

CHROMIUM = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync")
OPEN_MS, STEP_MS, FILTER_MS = 1_000.0, 100.0, 300.0
START_LIMIT_S = 60.0
_PAINTED = "const painted = () => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));"
_STEP = f"""
async (key) => {{
  {_PAINTED}
  await painted();
  const start = performance.now();
  document.dispatchEvent(new KeyboardEvent("keydown", {{ key, bubbles: true }}));
  const image = document.querySelector(".step:not([hidden]) img");
  await image.decode();
  await painted();
  return performance.now() - start;
}}
"""
_NARROW = f"""
async (index) => {{
  {_PAINTED}
  const links = [...document.querySelectorAll(".facet a[data-narrow]")].filter((link) => link.offsetParent);
  const link = links[index % links.length];
  performance.clearMarks("narrowed");
  await painted();
  const start = performance.now();
  link.click();
  while (!performance.getEntriesByName("narrowed").length) await new Promise((done) => setTimeout(done, 1));
  await painted();
  return performance.now() - start;
}}
"""
_OPENED = "() => (performance.getEntriesByName('first-contentful-paint')[0] || {}).startTime"


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    console = Console(width=max(140, Console().width))
    about = show_machine(console)
    try:
        results = run(console, arguments)
    except BenchmarkError as error:
        print(f"bench-viewer: {error}", file=sys.stderr)
        return 1
    finally:
        if not arguments.keep:
            shutil.rmtree(arguments.folder, ignore_errors=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"machine": about, "results": results}, indent=1) + "\n")
    return 0


def run(console: Console, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    small = StateDir(arguments.state.resolve()) if arguments.state else _store(arguments.folder / "small", 200, False)
    large = _store(arguments.folder / "large", arguments.episodes, True)
    figures: dict[str, tuple[Spread, float | None]] = {}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=list(CHROMIUM))
        try:
            figures |= _opening(browser, small, arguments.rounds)
            figures |= _using(browser, large, arguments)
        finally:
            browser.close()
    rows = [
        (name, spread.quartile_text(0), f"{spread.quantile(0.95):.0f}", _wanted(spread, limit))
        for name, (spread, limit) in figures.items()
    ]
    title = f"the viewer in Chromium, {arguments.episodes:,} episodes; to the frame that shows it"
    print_table(console, title, ("ms", "p50 [p25..p75]", "p95", "p50 at most"), rows)
    return [
        {"bench": "viewer", "figure": name, "unit": "ms", **spread.fields()} for name, (spread, _) in figures.items()
    ]


def _opening(browser: Browser, state: StateDir, rounds: int) -> dict[str, tuple[Spread, float | None]]:
    starts, firsts, warm = [], [], []
    for _ in range(rounds):
        began = time.perf_counter()
        with viewer(state) as url, opened(browser) as page:
            starts.append((time.perf_counter() - began) * 1e3)
            page.goto(url)
            firsts.append(_first_paint(page))
            for path in ("/", "/episodes"):
                page.goto(url + path)
                warm.append(_first_paint(page))
    return {
        "the program starts, to its address": (Spread.of(starts), None),
        "the first page after that, to its first paint": (Spread.of(firsts), OPEN_MS),
        "later pages, to their first paint": (Spread.of(warm), OPEN_MS),
    }


def _using(browser: Browser, state: StateDir, arguments: argparse.Namespace) -> dict[str, tuple[Spread, float | None]]:
    began = time.perf_counter()
    with viewer(state) as url, opened(browser) as page:
        page.goto(f"{url}/episodes", timeout=START_LIMIT_S * 1e3)
        first = (time.perf_counter() - began) * 1e3
        filters = [page.evaluate(_NARROW, 3 * number) for number in range(arguments.clicks)]
        page.goto(f"{url}/episodes")
        page.locator(".row-link").first.click()
        page.locator(".step:not([hidden]) img").wait_for()
        page.wait_for_timeout(500)
        keys = ["ArrowRight", "ArrowRight", "ArrowRight", "Home", "End", "ArrowLeft", "ArrowLeft", "ArrowLeft"]
        steps = [page.evaluate(_STEP, keys[number % len(keys)]) for number in range(arguments.clicks)]
        page.goto(f"{url}/episodes")
        searches = [_timed(page, f"{url}/episodes?said=scroll+{word}") for word in ("menu", "wait", "find")]
        asked = [_timed(page, f"{url}/episodes?where=len(token_ids)+%3E+{number}") for number in range(3)]
    return {
        f"{arguments.episodes:,} episodes from nothing: start, read, list": (Spread.of([first]), None),
        "a facet is clicked, to the list painted": (Spread.of(filters), FILTER_MS),
        "a key is pressed, to the step painted": (Spread.of(steps), STEP_MS),
        "a search in the models' text": (Spread.of(searches), None),
        "a condition in SQL": (Spread.of(asked), None),
    }


def _first_paint(page: Page) -> float:
    """First paint of the opened page, in milliseconds since the navigation began."""
    return page.wait_for_function(_OPENED, timeout=START_LIMIT_S * 1e3).json_value()


def _timed(page: Page, address: str) -> float:
    began = time.perf_counter()
    page.goto(address)
    return (time.perf_counter() - began) * 1e3


@contextmanager
def viewer(state: StateDir) -> Iterator[str]:
    """Run the viewer over a state folder; yields its address. Raises BenchmarkError if it does not start."""
    command = [sys.executable, "-m", "osworld_pipeline.cli", "view", "--state", str(state.root), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.search(r"http://\S+?(?=/ |/$|\s)", line)
            if found is None:
                raise BenchmarkError(f"the viewer did not start: {line.strip() or 'no output'}")
            yield found[0]
        finally:
            process.terminate()
            process.wait(10)


@contextmanager
def opened(browser: Browser) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": 1366, "height": 768})
    try:
        yield context.new_page()
    finally:
        context.close()


def _store(folder: Path, num_episodes: int, is_compacted: bool) -> StateDir:
    return (
        StateDir(folder)
        if folder.is_dir()
        else write_store(folder, num_episodes=num_episodes, is_compacted=is_compacted)
    )


def _wanted(spread: Spread, limit: float | None) -> str:
    return "" if limit is None else f"{limit:g}: {verdict(spread.median <= limit)}"


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench-viewer", description=__doc__)
    parser.add_argument("--episodes", type=int, default=100_000, help="of the large store")
    parser.add_argument("--clicks", type=int, default=40, help="how often a facet is clicked and a key pressed")
    parser.add_argument("--rounds", type=int, default=5, help="how often the viewer is started")
    parser.add_argument("--state", type=Path, help="a real state folder, for the figures of opening")
    parser.add_argument("--folder", type=Path, default=Path("var/bench-viewer"), help="folder of the synthetic stores")
    parser.add_argument("--keep", action="store_true", help="keep the stores for the next run")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure to FILE")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
