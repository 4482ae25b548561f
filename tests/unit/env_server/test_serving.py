"""The server runs as many calls at once as it has replicas, and its shutdown lets calls finish and leaves nothing."""

import asyncio
import json
import os
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_desktops import FakeProvider, until
from listening_server import Listening, listening
from starlette.responses import PlainTextResponse
from surface_server import TASK

from env_server.driving.driver import EpisodeDriver, Plan, View
from env_server.main import make_drivers
from env_server.protocols import ProvidedDesktop
from env_server.server_settings import ServerSettings
from env_server.serving import ExtraListener, bind, serve
from osworld_pipeline.domain.observation import Observation
from osworld_pipeline.domain.task import Task

NUM_REPLICAS = 64


class BlockingDriver:
    """A step blocks its thread, as encoding would, and only ends when all the others are blocked at the same time."""

    everybody = threading.Barrier(NUM_REPLICAS)

    async def prepare(self) -> None:
        return

    async def act(self, action: str, *, pause_s: float, settle: str) -> None:
        await asyncio.to_thread(self.everybody.wait, 20)

    async def observe(self, view: View) -> Observation:
        return Observation(screenshot=b"pixels")

    async def evaluate(self, *, last_action: str | None) -> float:
        return 1.0

    async def close(self) -> None:
        return


@dataclass(frozen=True)
class BlockingPlan:
    task: Task

    def drive(self, desktop: ProvidedDesktop) -> EpisodeDriver:
        return BlockingDriver()


class BlockingDrivers:
    grader_version = "none"

    def plan(self, task_config: Mapping[str, Any]) -> Plan:
        return BlockingPlan(Task.from_config(task_config))

    async def close(self) -> None:
        return


def client_of(server: Listening) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", limits=limits, timeout=30)


async def test_sixty_four_blocking_steps_run_in_parallel(tmp_path: Path) -> None:
    drivers = BlockingDrivers()
    async with listening(tmp_path, drivers=drivers, num_replicas=NUM_REPLICAS) as server, client_of(server) as http:
        resets = await asyncio.gather(*(http.post("/reset", json={"task_config": TASK}) for _ in range(NUM_REPLICAS)))
        bodies = [{"episode_id": answer.json()["episode_id"], "action": "WAIT", "pause": 0} for answer in resets]
        steps = await asyncio.gather(*(http.post("/step", json=body) for body in bodies))
    assert {answer.status_code for answer in steps} == {200}


async def term(server: Listening) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(0.05)
    assert not server.serving.done()


async def test_term_lets_calls_finish_and_refuses_new_episodes(tmp_path: Path) -> None:
    slow = {**TASK, "config": [{"type": "sleep", "parameters": {"seconds": 0.6}}]}
    async with listening(tmp_path, drain_timeout_s=20.0, num_replicas=3) as server, client_of(server) as http:
        idle = (await http.post("/reset", json={"task_config": TASK})).json()["episode_id"]
        opening = asyncio.create_task(http.post("/reset", json={"task_config": slow}))
        await asyncio.sleep(0.2)
        await term(server)
        refused = await http.post("/reset", json={"task_config": TASK})
        assert (refused.status_code, refused.json()["fault"]) == (503, "no_capacity")
        assert int(refused.headers["retry-after"]) >= 1
        assert (await http.get("/readyz")).status_code == 503
        step = await http.post("/step", json={"episode_id": idle, "action": "WAIT", "pause": 0})
        assert step.status_code == 200, "who is there may go on while others finish"
        assert (await opening).status_code == 200
        await asyncio.wait_for(server.serving, 5)
    assert all(desktop.is_stopped for desktop in server.provider.desktops)
    assert server.provider.is_closed


async def test_term_waits_for_calls_only_up_to_a_limit(tmp_path: Path) -> None:
    endless = {**TASK, "config": [{"type": "sleep", "parameters": {"seconds": 50}}]}
    async with listening(tmp_path, drain_timeout_s=0.3) as server, client_of(server) as http:
        opening = asyncio.create_task(http.post("/reset", json={"task_config": endless}))
        await asyncio.sleep(0.2)
        await term(server)
        await asyncio.wait_for(server.serving, 8)
        answer = await opening
        assert (answer.status_code, answer.json()["fault"]) == (503, "no_capacity")
    assert all(desktop.is_stopped for desktop in server.provider.desktops)


async def test_second_term_ends_the_wait_for_calls(tmp_path: Path) -> None:
    endless = {**TASK, "config": [{"type": "sleep", "parameters": {"seconds": 50}}]}
    async with listening(tmp_path, drain_timeout_s=60.0) as server, client_of(server) as http:
        opening = asyncio.create_task(http.post("/reset", json={"task_config": endless}))
        await asyncio.sleep(0.2)
        await term(server)
        await term(server)
        await asyncio.wait_for(server.serving, 3)
        await asyncio.gather(opening, return_exceptions=True)
    assert all(desktop.is_stopped for desktop in server.provider.desktops)


async def test_term_without_calls_in_progress_ends_at_once_though_episodes_are_open(tmp_path: Path) -> None:
    async with listening(tmp_path, drain_timeout_s=60.0) as server, client_of(server) as http:
        await http.post("/reset", json={"task_config": TASK})
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(server.serving, 3)


async def test_term_lets_episodes_end_if_configured_and_then_ends_the_server_at_once(tmp_path: Path) -> None:
    async with listening(tmp_path, drain_episodes_s=60.0) as server, client_of(server) as http:
        first, second = [(await http.post("/reset", json={"task_config": TASK})).json()["episode_id"] for _ in range(2)]
        await term(server)
        assert (await http.get("/health")).json()["status"] == "draining"
        assert (await http.post("/reset", json={"task_config": TASK})).status_code == 503
        for episode_id in (first, second):
            step = await http.post("/step", json={"episode_id": episode_id, "action": "WAIT", "pause": 0})
            assert step.status_code == 200
            assert not server.serving.done()
            await http.post("/close", json={"episode_id": episode_id})
        await asyncio.wait_for(server.serving, 3)
    assert all(desktop.is_stopped for desktop in server.provider.desktops)


async def test_term_waits_for_episodes_only_up_to_a_limit_and_a_second_term_ends_the_wait(tmp_path: Path) -> None:
    for limit_s, signals in ((0.3, 1), (60.0, 2)):
        folder = tmp_path / str(signals)
        folder.mkdir()
        async with listening(folder, drain_episodes_s=limit_s) as server, client_of(server) as http:
            await http.post("/reset", json={"task_config": TASK})
            await term(server)
            for _ in range(signals - 1):
                os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait_for(server.serving, 4)
        assert all(desktop.is_stopped for desktop in server.provider.desktops)


async def test_further_port_serves_the_same_episodes_with_an_application_of_its_own(tmp_path: Path) -> None:
    settings = ServerSettings.from_environment(
        {}, port=0, num_replicas=1, ready_file=tmp_path / "ready", drain_timeout_s=0
    )
    tables: list[Any] = []

    def make_app(episodes: Any) -> Any:
        tables.append(episodes)
        return PlainTextResponse("extra")

    with bind(settings) as main, bind(settings) as extra:
        ports = main.getsockname()[1], extra.getsockname()[1]
        extra_listeners = [ExtraListener(listener=extra, make_app=make_app)]
        serving = asyncio.create_task(serve(settings, FakeProvider(), make_drivers(settings), main, extra_listeners))
        await until((tmp_path / "ready").exists)
        async with httpx.AsyncClient() as http:
            assert (await http.get(f"http://127.0.0.1:{ports[1]}/")).text == "extra"
            await http.post(f"http://127.0.0.1:{ports[0]}/reset", json={"task_config": TASK})
            assert len(tables[0]) == 1
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(serving, 5)


async def test_with_json_the_line_of_a_ready_server_is_an_object(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ServerSettings.from_environment(
        {}, port=0, num_replicas=1, ready_file=tmp_path / "ready", drain_timeout_s=0
    )
    with bind(settings) as listener:
        serving = asyncio.create_task(serve(settings, FakeProvider(), make_drivers(settings), listener, as_json=True))
        await until((tmp_path / "ready").exists)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(serving, 5)
    (line,) = capsys.readouterr().out.splitlines()
    facts = {"num_replicas": 1, "num_ready": 1, "provider": settings.provider}
    assert json.loads(line) == {**json.loads((tmp_path / "ready").read_text()), **facts}
