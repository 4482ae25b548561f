"""Take the pictures of the documentation in Chromium, from a state folder with a finished run:

    python docs/make_screenshots.py --state var --dagster http://127.0.0.1:3000 --env-server http://127.0.0.1:8100

This program writes the report and starts the viewer on a free port; Dagster (`make dev`) and an env server must
run already. A picture whose address is not given is not changed. It needs the extra `dev` and Chromium
(`osworld-pipeline setup extras`). Each picture is at most 250 kB, and the recording of the env server's page 1 MB.
"""

import argparse
import io
import json
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

if TYPE_CHECKING:
    from playwright.sync_api import Browser, FloatRect, Page

DOCS = Path(__file__).resolve().parent
SIZE = (1366, 768)
MAX_BYTES = 250_000
PAGE_LIMIT_MS = 60_000
START_LIMIT_S = 60.0
LIST = "purpose=evaluate&stage=gspo_phase1&stage=gspo_phase2"
CLICKED = """
SELECT episode_id, s.step_index FROM steps s JOIN episodes e USING (episode_id)
WHERE e.is_success AND e.purpose = 'evaluate' AND e.checkpoint_id LIKE 'gspo_phase2-%' AND s.command LIKE '%.click(%'
ORDER BY e.num_steps DESC, episode_id, s.step_index LIMIT 1
"""
GRAPH = "asset-groups/"
"""Page of Dagster's UI with all assets as a graph."""
LAUNCHPAD = "locations/osworld_pipeline/jobs/train/playground"
RUN = """resources:
  recipe:
    config:
      name: demo
      overrides:
        gspo:
          phase1: {temperature: warm}
          """
"""The configuration in the picture of the launchpad, with a wrong type."""
RECORDED_S = 20.0
FRAMES_PER_S = 2.0
"""The frame rate of the page."""
RECORDING_WIDTH = 820
MAX_RECORDING_BYTES = 1_000_000


class ScreenshotError(Exception):
    """A picture could not be taken. The message names the cause."""


def main(argv: list[str] | None = None) -> int:
    arguments = _parse(argv)
    state: Path = arguments.state.resolve()
    pictures: dict[str, Callable[[Browser], bytes]] = {}
    with _viewer(state) as viewer:
        if viewer:
            pictures["viewer-list.png"] = partial(_shoot, url=f"{viewer}/episodes?{LIST}")
            pictures["viewer-episode.png"] = partial(_shoot, url=f"{viewer}/episode/{_episode(state)}")
        training = _report(state, ["--training", arguments.training])
        pictures["training-report.png"] = partial(_shoot, url=training.as_uri(), settle=_to_the_plots)
        if arguments.dagster:
            address = arguments.dagster.rstrip("/")
            pictures["asset-graph.png"] = partial(_shoot, url=f"{address}/{GRAPH}", settle=_graph)
            pictures["launchpad.png"] = partial(_shoot, url=f"{address}/{LAUNCHPAD}", settle=_launchpad)
        if arguments.env_server:
            status = f"{arguments.env_server.rstrip('/')}/status"
            pictures["env-server-status.webp"] = partial(_record, url=status)
        return _take(pictures, arguments.output)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", type=Path, default=Path("var"), help="with a finished run (default var)")
    parser.add_argument("--training", default="gspo_phase1", help="stage whose page is shown (default gspo_phase1)")
    parser.add_argument("--dagster", default="", metavar="URL", help="of a running Dagster, for its pictures")
    parser.add_argument("--env-server", default="", metavar="URL", help="of a busy env server, to record its page")
    parser.add_argument("--output", type=Path, default=DOCS, help="folder of the pictures (default docs)")
    return parser.parse_args(argv)


def _take(pictures: Mapping[str, "Callable[[Browser], bytes]"], folder: Path) -> int:
    """Take each picture; a failure does not stop the others. Returns the exit status."""
    from playwright.sync_api import Error, sync_playwright

    program = shutil.which("chromium")
    if program is None:
        raise ScreenshotError("there is no chromium; install it: osworld-pipeline setup extras")
    failed = 0
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for name, take in pictures.items():
            try:
                data = take(browser)
                data = data if name.endswith(".webp") else shrink(data)
            except (Error, ScreenshotError) as error:
                print(f"{name} was not taken: {str(error).splitlines()[0]}", file=sys.stderr)
                failed += 1
                continue
            (folder / name).write_bytes(data)
            print(f"{folder / name}: {len(data) // 1000} kB")
        browser.close()
    return 1 if failed else 0


def shrink(png: bytes, *, max_bytes: int = MAX_BYTES) -> bytes:
    """The picture with as many colours as fit into `max_bytes`; ScreenshotError if even the fewest do not fit."""
    with Image.open(io.BytesIO(png)) as image:
        whole = image.convert("RGB")
    for num_colours in (256, 128, 64, 32):
        sink = io.BytesIO()
        whole.quantize(num_colours, dither=Image.Dither.NONE).save(sink, "PNG", optimize=True)
        if sink.tell() <= max_bytes:
            return sink.getvalue()
    raise ScreenshotError(
        f"the picture takes {sink.tell() // 1000} kB with {num_colours} colours; show less of the page"
    )


def _shoot(browser: "Browser", *, url: str, settle: "Callable[[Page], FloatRect] | None" = None) -> bytes:
    page = browser.new_page(viewport={"width": SIZE[0], "height": SIZE[1]}, color_scheme="light")
    try:
        page.goto(url, wait_until="load", timeout=PAGE_LIMIT_MS)
        page.wait_for_timeout(1500)
        if settle is not None:
            return page.screenshot(clip=settle(page))
        return page.screenshot()
    finally:
        page.close()


def _record(browser: "Browser", *, url: str) -> bytes:
    """A recording of the page for RECORDED_S, as an animated WebP in real time."""
    page = browser.new_page(viewport={"width": SIZE[0], "height": SIZE[1]}, color_scheme="light")
    pictures: list[Image.Image] = []
    try:
        page.goto(url, wait_until="load", timeout=PAGE_LIMIT_MS)
        page.wait_for_timeout(1500)
        started = time.monotonic()
        while (elapsed := time.monotonic() - started) < RECORDED_S:
            page.wait_for_timeout(max(0.0, len(pictures) / FRAMES_PER_S - elapsed) * 1000)
            with Image.open(io.BytesIO(page.screenshot())) as picture:
                height = round(picture.height * RECORDING_WIDTH / picture.width)
                pictures.append(picture.convert("RGB").resize((RECORDING_WIDTH, height), Image.Resampling.LANCZOS))
    finally:
        page.close()
    duration_ms = round(1000 * RECORDED_S / len(pictures))
    for quality in (60, 40, 20):
        sink = io.BytesIO()
        options = {"save_all": True, "append_images": pictures[1:], "duration": duration_ms, "loop": 0}
        pictures[0].save(sink, "WEBP", quality=quality, method=4, **options)
        if sink.tell() <= MAX_RECORDING_BYTES:
            return sink.getvalue()
    raise ScreenshotError(f"the recording takes {sink.tell() // 1000} kB; lower RECORDED_S or RECORDING_WIDTH")


def _graph(page: "Page") -> "FloatRect":
    """The area of the graph, once all of it is visible. Dagster draws the graph some time after the page has loaded,
    with its groups folded and the side panels open; the wheel moves it."""
    page.set_viewport_size({"width": 1700, "height": 1150})
    page.reload()  # Dagster scales the graph to the page's size at load time
    page.wait_for_selector("foreignObject >> text=upkeep", timeout=PAGE_LIMIT_MS)
    page.wait_for_timeout(2000)
    page.get_by_text("Hide navigation").click()
    page.wait_for_timeout(1000)
    page.mouse.click(340, 80)  # folds the list of groups
    smaller = (1672, 1001)
    for group, num_smaller in (("evaluation", 0), ("checkpoints", 4), ("tables", 2)):
        page.locator(f"foreignObject >> text={group}").first.click()
        page.wait_for_timeout(2500)
        for _ in range(num_smaller):
            page.mouse.click(*smaller)
            page.wait_for_timeout(500)
    page.mouse.move(900, 600)
    page.mouse.wheel(480, -60)
    page.wait_for_timeout(1500)
    return {"x": 160, "y": 112, "width": 1480, "height": 930}


def _launchpad(page: "Page") -> "FloatRect":
    """The editor with an error, and with the completions of a section."""
    page.locator(".CodeMirror").first.click(timeout=PAGE_LIMIT_MS)
    page.keyboard.press("Control+A")
    page.keyboard.insert_text(RUN)
    page.wait_for_timeout(3000)
    page.keyboard.press("Control+Space")
    page.wait_for_timeout(2500)
    return {"x": 240, "y": 0, "width": SIZE[0] - 240, "height": SIZE[1]}


def _to_the_plots(page: "Page") -> None:
    page.evaluate("[...document.querySelectorAll('h2')].find(one => one.textContent === 'Rollouts')?.scrollIntoView()")


def _report(state: Path, options: list[str]) -> Path:
    """Write a report and return its path."""
    return Path(_pipeline("report", "--state", str(state), *options).strip().splitlines()[-1])


def _episode(state: Path) -> str:
    """The end of the URL of a click's step: in the longest successful evaluation episode with a click."""
    found = json.loads(_pipeline("query", CLICKED, "--format", "json", "--state", str(state)))
    if not found:
        raise ScreenshotError(
            "no picture was taken: no successful evaluation episode of gspo_phase2 has a click; give another --state"
        )
    return f"{found[0]['episode_id']}?step={found[0]['step_index'] + 1}"


def _pipeline(*words: str) -> str:
    """Run a command and return its output."""
    command = [sys.executable, "-m", "osworld_pipeline.cli", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode != 0:
        errors = done.stderr.strip().splitlines()
        raise ScreenshotError(errors[-1] if errors else f"{words[0]} failed")
    return done.stdout


@contextmanager
def _viewer(state: Path) -> Iterator[str]:
    """Run a viewer and yield its address; empty if it did not start."""
    command = [sys.executable, "-m", "osworld_pipeline.cli", "view", "--state", str(state), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield _address(process)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()


def _address(process: "subprocess.Popen[str]") -> str:
    """The address that it prints when it listens."""
    found: list[str] = []
    read = threading.Event()

    def listen() -> None:
        for line in process.stdout or ():
            if match := re.search(r"http://\S+", line):
                found.append(match[0].rstrip(".,"))
                read.set()
        read.set()

    threading.Thread(target=listen, daemon=True).start()
    read.wait(START_LIMIT_S)
    if not found:
        print("the viewer's pictures were not taken: the viewer printed no address", file=sys.stderr)
    return found[0].rstrip("/") if found else ""


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ScreenshotError as error:
        sys.exit(str(error))
