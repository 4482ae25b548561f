"""Real remote sandboxes: an env server whose desktops are behind a gateway process, over HTTPS, with quota waits and
failures; a browser inside a sandbox, inspected from outside; and what a killed env server leaves behind."""

import asyncio
import json
import shutil
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from desktop_env_place import find_python
from env_server_process import RunningServer, desktops_below, running_env_server
from gateway_process import TOKEN, RunningGateway, running_gateway
from group_runs import run_groups
from test_rollout import PLAN, SCREEN, SETTINGS, OraclePolicy, suite_tasks

from env_server.driving.download import Downloader
from env_server.driving.guest_driver import GuestDrivers
from env_server.providers.desktop_env.graders import OSWorldGraders
from env_server.providers.gateway.client import SandboxBusyError
from env_server.providers.gateway.port_tunnel import forwarded_ports
from env_server.providers.gateway.provider import GatewayProvider
from env_server.providers.gateway.settings import GatewaySettings
from env_server.settings import TaskLimits
from osworld_pipeline.agent.processor import load_processor
from osworld_pipeline.agent.renderer import Renderer
from osworld_pipeline.domain.episode import Outcome
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.rollout.env_client import EnvClient
from osworld_pipeline.rollout.run_episode import EpisodeTools
from osworld_pipeline.store.trajectories import TrajectoryStore
from osworld_pipeline.wire import EnvConfig

pytestmark = [
    pytest.mark.desktop, pytest.mark.slow,
    pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl"),
]  # fmt: skip

VLC_STAND_IN = """
import http.server
class Status(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = b"<root><state>playing</state></root>" * 5000
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
http.server.ThreadingHTTPServer(("127.0.0.1", 8080), Status).serve_forever()
"""


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("images")


def wait_until(condition: Callable[[], bool], limit_s: float = 120.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def env_server_behind(gateway: RunningGateway, folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OSWORLD_SANDBOX_TOKEN", TOKEN)
    return running_env_server(
        folder, "--provider", "gateway", "--gateway-url", gateway.url, "--gateway-ca-file", str(gateway.certificate),
        "--screen-size", f"{SCREEN[0]}x{SCREEN[1]}", "--log-level", "debug",
    )  # fmt: skip


@pytest.mark.timeout(400)
async def test_episodes_succeed_through_a_gateway_that_is_full_fails_loses_answers_and_is_slow(
    images: Path, tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At first another client has the only sandbox of the quota. A step whose answer was lost is not done twice;
    otherwise the typed words would be wrong and the grader would report that."""
    faults = "fail=0.1,lose=0.1,busy=0.1,slow=0.05:0.3"
    with running_gateway(
        tmp_path, "--quota", "1", "--retry-after-s", "1", "--faults", faults, "--fault-seed", "3",
        images=images, screen=SCREEN,
    ) as gateway:  # fmt: skip
        other = GatewayProvider(GatewaySettings(url=gateway.url), screen_size=SCREEN, client=gateway.client())
        theirs = await other.start("somebody-else")
        started: list[RunningServer] = []
        done = threading.Event()

        def serve() -> None:
            with env_server_behind(gateway, tmp_path, monkeypatch) as server:
                started.append(server)
                done.wait(200)

        serving = threading.Thread(target=serve)
        serving.start()
        try:
            await asyncio.to_thread(wait_until, lambda: gateway.health()["refused"] >= 2)
            assert not started
            await theirs.stop()
            await asyncio.to_thread(wait_until, lambda: bool(started) or not serving.is_alive())
            tasks = suite_tasks("rename_folder")
            renderer = Renderer(load_processor(tiny_folder))
            config = EnvConfig(screen_size=SCREEN, require_a11y_tree=False)
            async with EnvClient(started[0].url, env_config=config, client_id="test") as client:
                tools = EpisodeTools(
                    desktop_factory=client.desktop,
                    engine=OraclePolicy(renderer, tasks),
                    renderer=renderer,
                    sink=TrajectoryStore(StateDir(tmp_path / "var")),
                )
                settings = replace(SETTINGS, max_turns=len(tasks[0].oracle))
                groups = await run_groups([task.task for task in tasks], PLAN, tools=tools, settings=settings)
        finally:
            done.set()
            await asyncio.to_thread(serving.join, 60)
            await other.close()
        episodes = [episode for group in groups for episode in group.episodes]
        assert [(episode.outcome, episode.error) for episode in episodes] == [(Outcome.SUCCESS, None)] * 2
        assert {episode.provider for episode in episodes} == {"gateway"}
        assert [episode.attempt for episode in episodes] == [0, 0]
        health = gateway.health()
        assert min(health["faults"].get(kind, 0) for kind in ("fail", "lose", "busy")) > 0
        assert health["started"] >= 3
        assert gateway.health()["taken"] == 0
        assert desktops_below(gateway.process.pid) == []
        logs = gateway.log.read_text() + started[0].log.read_text()
        assert "waits for quota" in logs
        assert TOKEN not in logs


@pytest.fixture
def gateway(images: Path, tmp_path: Path) -> Iterator[RunningGateway]:
    with running_gateway(
        tmp_path, "--quota", "1", "--lifetime-s", "3", "--desktop-memory-mb", "1536", images=images, screen=SCREEN
    ) as running:
        yield running


@pytest.fixture
async def provider(gateway: RunningGateway) -> AsyncIterator[GatewayProvider]:
    made = GatewayProvider(GatewaySettings(url=gateway.url), screen_size=SCREEN, client=gateway.client())
    try:
        yield made
    finally:
        await made.close()


async def answers(http: httpx.AsyncClient, url: str, limit_s: float = 60.0) -> httpx.Response:
    """Retries, because a server that is still starting refuses connections."""
    async with asyncio.timeout(limit_s):
        while True:
            try:
                return await http.get(url, timeout=30)
            except httpx.HTTPError:
                await asyncio.sleep(0.3)


@pytest.mark.timeout(200)
async def test_a_grader_reaches_vlcs_port_inside_a_sandbox(provider: GatewayProvider) -> None:
    desktop = await provider.start("r0")
    await desktop.guest.launch(["python", "-c", VLC_STAND_IN])
    async with forwarded_ports(desktop.guest) as forwarded, httpx.AsyncClient(trust_env=False) as http:
        answer = await answers(http, f"http://127.0.0.1:{forwarded['vlc']}/requests/status.xml")
        assert answer.text == "<root><state>playing</state></root>" * 5000
        several = await asyncio.gather(
            *(http.get(f"http://127.0.0.1:{forwarded['vlc']}/", timeout=60) for _ in range(3))
        )
        assert {each.content for each in several} == {answer.content}
        with pytest.raises(httpx.HTTPError):  # no browser is there
            await http.get(f"http://127.0.0.1:{forwarded['chromium']}/json/version", timeout=30)
    with pytest.raises(httpx.ConnectError):
        async with httpx.AsyncClient(trust_env=False) as http:
            await http.get(f"http://127.0.0.1:{forwarded['vlc']}/")


@pytest.mark.browser
@pytest.mark.timeout(300)
async def test_a_grader_inspects_a_browser_inside_a_sandbox_as_osworlds_grader_does(provider: GatewayProvider) -> None:
    """Uses Playwright over the debugging port, as OSWorld's getters do."""
    from playwright.async_api import async_playwright

    desktop = await provider.start("r0")
    page = "data:text/html,<title>A page inside</title>hello"
    await desktop.guest.launch(["google-chrome", "--remote-debugging-port=1337", page])
    async with forwarded_ports(desktop.guest) as forwarded, httpx.AsyncClient(trust_env=False) as http:
        url = f"http://127.0.0.1:{forwarded['chromium']}"
        assert "webSocketDebuggerUrl" in (await answers(http, f"{url}/json/version")).json()
        async with async_playwright() as playwright:
            browser = await playwright.chromium.connect_over_cdp(url, timeout=120_000)
            titles = [await page.title() for context in browser.contexts for page in context.pages]
            await browser.close()
    assert "A page inside" in titles


PAGE = b"<title>A page inside</title>hello"
FILM = """
import http.server
class Status(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = b"<root><state>playing</state><information><category name='meta'><info name='filename'>film.mp4</info>" \
            b"</category></information></root>"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
http.server.ThreadingHTTPServer(("127.0.0.1", 8080), Status).serve_forever()
"""
"""What VLC answers at /requests/status.xml, for there is no VLC here."""
TABS_AND_FILM = {
    "id": "tabs-and-film",
    "instruction": "Open the page and play the film.",
    "config": [
        {"type": "launch", "parameters": {"command": ["google-chrome", "--remote-debugging-port=1337"]}},
        {"type": "launch", "parameters": {"command": ["python", "-c", FILM]}},
        {"type": "chrome_open_tabs", "parameters": {"urls_to_open": ["file:///home/user/page.html"]}},
    ],
    "evaluator": {
        "func": ["is_expected_tabs", "is_vlc_playing"],
        "result": [{"type": "open_tabs_info"}, {"type": "vlc_playing_info", "dest": "status.xml"}],
        "expected": [
            {"type": "rule", "rules": {"type": "url", "urls": ["file:///home/user/page.html"]}},
            {"type": "rule", "rules": {"type": "file_name", "file_name": "film.mp4"}},
        ],
    },
}


@pytest.mark.browser
@pytest.mark.desktop_env
@pytest.mark.timeout(600)
async def test_osworlds_getters_of_browser_and_vlc_grade_inside_a_sandbox(
    provider: GatewayProvider, tmp_path: Path
) -> None:
    """OSWorld's own getters use Playwright and requests, at ports of this machine. They distinguish a wrong page from
    the right one."""
    limits = TaskLimits(setup_timeout_s=180, evaluate_timeout_s=180)
    graders = OSWorldGraders(python=find_python(), folder=tmp_path / "graders", with_ports=True)
    drivers = GuestDrivers(limits=limits, downloader=Downloader(limits), screen=SCREEN, graders=graders)
    wrong: dict[str, Any] = json.loads(json.dumps(TABS_AND_FILM))
    wrong["evaluator"]["expected"][0]["rules"]["urls"] = ["file:///home/user/another.html"]
    desktop = await provider.start("r0")
    await desktop.guest.upload("/home/user/page.html", PAGE)
    try:
        driver = drivers.plan(TABS_AND_FILM).drive(desktop)
        await driver.prepare()
        assert await driver.evaluate(last_action="DONE") == 1.0
        assert await drivers.plan(wrong).drive(desktop).evaluate(last_action="DONE") == 0.0
    finally:
        await drivers.close()


@pytest.mark.timeout(200)
async def test_a_sandbox_of_a_killed_env_server_is_free_again_after_its_lifetime(
    gateway: RunningGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with env_server_behind(gateway, tmp_path, monkeypatch) as server:
        async with httpx.AsyncClient(trust_env=False) as http:
            assert (await http.get(f"{server.url}/v1/server", timeout=10)).json()["provider"] == "gateway"
        assert gateway.health()["taken"] == 1
        await asyncio.sleep(4)  # longer than a lifetime: the env server refreshes it
        assert gateway.health()["taken"] == 1
        client = gateway.client()
        with pytest.raises(SandboxBusyError):
            await client.start("another", limit_s=30)
        server.process.kill()
        wait_until(lambda: gateway.health()["taken"] == 0)
        sandbox = await client.start("another", limit_s=60)
        await client.stop(sandbox, limit_s=30)
        await client.close()
