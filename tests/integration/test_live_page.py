"""The viewer's page of live desktops in a real browser, over the real program and two real env servers."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from painted_desktops import TASK
from playwright.sync_api import Page, expect
from viewer_samples import GSPO, KEY, TASKS, write_sample_store

from osworld_pipeline.domain.state import StateDir

pytestmark = [pytest.mark.slow, pytest.mark.browser]

TOKEN = "a server's secret"
STORED = f"eval-{GSPO}-{KEY}-{TASKS[0][0]}-s0"
PAINTED = Path(__file__).parents[1] / "painted_desktops.py"
READY_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Server:
    url: str
    process: subprocess.Popen[bytes]

    @property
    def name(self) -> str:
        return self.url.removeprefix("http://")


@contextmanager
def painted(folder: Path, *, num_replicas: int = 2) -> Iterator[Server]:
    """An env server of its own process."""
    folder.mkdir()
    ready = folder / "ready.json"
    command = [sys.executable, str(PAINTED), "--replicas", str(num_replicas), "--ready-file", str(ready)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "ENV_SERVER_TOKEN": TOKEN})
    try:
        until = time.monotonic() + READY_S
        while not ready.exists():
            assert process.poll() is None, (folder / "log").read_text()[-2000:]
            assert time.monotonic() < until
            time.sleep(0.05)
        yield Server(url=json.loads(ready.read_text())["url"], process=process)
    finally:
        process.kill()
        process.wait(10)


@contextmanager
def viewer(state: StateDir, *urls: str) -> Iterator[str]:
    """Starts the viewer, and yields its address."""
    options = [word for url in urls for word in ("--env-server-url", url)]
    command = [
        sys.executable, "-m", "osworld_pipeline.cli", "view", "--state", str(state.root), "--port", "0", *options,
    ]  # fmt: skip
    environment = {**os.environ, "ENV_SERVER_TOKEN": TOKEN}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+", line)
        assert found, line + process.stdout.read()
        yield found[0]
    finally:
        process.kill()
        process.wait(10)
        process.stdout.close()


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[tuple[Server, Server]]:
    with ExitStack() as stack:
        yield stack.enter_context(painted(tmp_path / "a")), stack.enter_context(painted(tmp_path / "b"))


@pytest.fixture
def url(tmp_path: Path, servers: tuple[Server, Server]) -> Iterator[str]:
    state = StateDir(tmp_path / "var")
    write_sample_store(state)
    with viewer(state, *(server.url for server in servers)) as address:
        yield address


def play(server: Server, record_id: str, *, is_over: bool = False) -> None:
    with httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=30) as http:

        def post(path: str, **body: Any) -> dict[str, Any]:
            return http.post(path, json=body).raise_for_status().json()

        episode_id = post("/reset", task_config=TASK, record_id=record_id)["episode_id"]
        note = "The note is in the middle of the desktop. I click it."
        post("/step", episode_id=episode_id, action="pyautogui.click(320, 100)", pause=0, note=note)
        if is_over:
            post("/evaluate", episode_id=episode_id)
            post("/close", episode_id=episode_id)


def test_all_desktops_are_shown_one_is_enlarged_and_a_server_that_vanishes_is_named(
    page: Page, url: str, servers: tuple[Server, Server], complaints: list[str]
) -> None:
    one, other = servers
    play(one, STORED, is_over=True)
    play(one, "playing-now")
    play(other, "playing-elsewhere")
    page.goto(url)
    page.get_by_role("link", name="Live desktops").click()
    cards = page.locator(".card")
    expect(cards).to_have_count(4)
    expect(page.locator(".card img:visible")).to_have_count(4)
    expect(page.locator("#condition")).to_have_text("2 env servers, 2 episodes")
    assert set(page.locator(".card .where").all_inner_texts()) == {f"on {one.name}", f"on {other.name}"}

    playing = cards.filter(has_text="playing-now")
    expect(playing.locator(".task")).to_contain_text("rename-note: Rename the note on the desktop to <b>done</b>.")
    expect(playing.locator(".who")).to_contain_text("step 1")
    expect(playing.locator(".action")).to_have_text("pyautogui.click(320, 100)")
    expect(playing.locator(".mark")).to_have_count(1)
    assert playing.locator(".mark").evaluate("one => [one.style.left, one.style.top]") == ["50%", "25%"]
    expect(playing.get_by_role("link")).to_have_count(0)
    before = playing.locator("img").get_attribute("src") or ""
    expect(playing.locator("img")).not_to_have_attribute("src", before)
    take_picture(page, "live-desktops")

    played = cards.filter(has_text=STORED)
    expect(played.locator(".past")).to_contain_text("last: reward 0 after 1 step")
    with page.context.expect_page() as opened:
        played.get_by_role("link", name=STORED).click()
    expect(opened.value.locator("h1")).to_be_visible()
    assert opened.value.url == f"{url}/episode/{STORED}"
    opened.value.close()

    page.get_by_role(
        "button", name=re.compile(f"Enlarge the screen of stub-0 on {re.escape(other.name)}")
    ).first.click()
    large = page.locator("#zoom-image")
    expect(large).to_have_attribute("src", re.compile("^blob:"))
    expect(large).not_to_have_attribute("src", large.get_attribute("src") or "")
    expect(page.locator("#zoom-title")).to_contain_text(other.name)
    take_picture(page, "live-enlarged")
    assert complaints == []

    other.process.send_signal(signal.SIGKILL)
    expect(page.locator("#zoom-title")).to_contain_text("no answer")
    expect(page.locator("#servers li", has_text=other.name)).to_contain_text("no env server answers at")
    expect(page.locator("#condition")).to_have_text("no answer from 1 of 2 env servers")
    expect(page.get_by_role("dialog")).not_to_be_visible()
    expect(cards).to_have_count(2)
    expect(page.locator(".card.lost")).to_have_count(0)
    take_picture(page, "live-lost")
    assert TOKEN not in page.content()


@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_fits_its_window_and_filters_by_state(page: Page, url: str, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    page.goto(f"{url}/live")
    expect(page.locator(".card img:visible")).to_have_count(4)
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    take_picture(page, f"live-{width}")
    page.locator("#states button", has_text="starting").click()
    expect(page.locator("#none")).to_be_visible()
    expect(page.locator(".card:visible")).to_have_count(0)


def take_picture(page: Page, name: str) -> None:
    if folder := os.environ.get("OSWORLD_TEST_PICTURES"):
        page.screenshot(path=f"{folder}/{name}.png")
