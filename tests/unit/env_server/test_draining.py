"""The end of a real server by the API: the same as by SIGTERM, with a deadline in the request."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from fake_desktops import until
from listening_server import Listening, listening
from surface_server import TASK

from osworld_pipeline.domain.episode import Outcome
from osworld_pipeline.domain.task import Task
from osworld_pipeline.rollout.env_answers import UnreachableError
from osworld_pipeline.rollout.env_client import EnvClient, EnvTimeouts
from osworld_pipeline.wire.faults import outcome_of

FAKE_SERVER = Path(__file__).with_name("fake_server.py")


def client_of(server: Listening) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=30)


async def opened(http: httpx.AsyncClient) -> str:
    return (await http.post("/reset", json={"task_config": TASK})).json()["episode_id"]


async def test_live_episodes_continue_new_ones_are_refused_and_the_server_ends_with_the_last(tmp_path: Path) -> None:
    async with listening(tmp_path) as server, client_of(server) as http:
        first, second = await opened(http), await opened(http)
        answer = await http.post("/v1/server/drain", json={"deadline_s": 60})
        assert (answer.status_code, answer.json()["num_episodes"]) == (200, 2)
        assert 59 < answer.json()["left_s"] <= 60
        assert (await http.get("/health")).json()["status"] == "draining"
        assert (await http.post("/reset", json={"task_config": TASK})).status_code == 503
        for episode_id in (first, second):
            step = await http.post("/step", json={"episode_id": episode_id, "action": "WAIT", "pause": 0})
            assert step.status_code == 200
            assert not server.serving.done()
            await http.post("/close", json={"episode_id": episode_id})
        await asyncio.wait_for(server.serving, 5)
    assert all(desktop.is_stopped for desktop in server.provider.desktops)


async def test_an_episode_open_at_the_deadline_ends_as_a_fault_of_its_desktop(tmp_path: Path) -> None:
    async with listening(tmp_path) as server:
        url = f"http://127.0.0.1:{server.port}"
        async with EnvClient(url, timeouts=EnvTimeouts(resend_s=0.2)) as client:
            desktop = client.desktop()
            await desktop.reset(Task.from_config(TASK))
            async with client_of(server) as http:
                await http.post("/v1/server/drain", json={"deadline_s": 0.5})
            await desktop.act("WAIT", pause_s=0)
            await asyncio.wait_for(server.serving, 5)
            with pytest.raises(UnreachableError) as ended:
                await desktop.act("WAIT", pause_s=0)
            assert outcome_of(ended.value) is Outcome.ENV_FAULT
    assert all(desktop.is_stopped for desktop in server.provider.desktops)


async def test_the_earliest_of_several_deadlines_counts(tmp_path: Path) -> None:
    async with listening(tmp_path) as server, client_of(server) as http:
        await opened(http)
        for deadline_s, most_s in ((60, 60), (10, 10), (60, 10)):
            answer = await http.post("/v1/server/drain", json={"deadline_s": deadline_s})
            assert most_s - 2 < answer.json()["left_s"] <= most_s
        assert not server.serving.done()
        await http.post("/v1/server/drain", json={"deadline_s": 0})
        await asyncio.wait_for(server.serving, 5)


async def test_a_signal_after_a_drain_brings_its_own_limit_and_a_second_one_ends_at_once(tmp_path: Path) -> None:
    for limit_s, num_signals in ((0.2, 1), (60.0, 2)):
        folder = tmp_path / str(num_signals)
        folder.mkdir()
        async with listening(folder, drain_episodes_s=limit_s) as server, client_of(server) as http:
            await opened(http)
            await http.post("/v1/server/drain", json={"deadline_s": 600})
            for _ in range(num_signals):
                assert not server.serving.done()
                os.kill(os.getpid(), signal.SIGTERM)
                await asyncio.sleep(0.05)
            await asyncio.wait_for(server.serving, 5)
        assert all(desktop.is_stopped for desktop in server.provider.desktops)


async def test_the_program_of_a_drained_server_exits_with_success(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, str(FAKE_SERVER), str(tmp_path)])  # noqa: ASYNC220 - starts at once
    try:
        await until((tmp_path / "ready.json").exists, 30.0)
        url = json.loads((tmp_path / "ready.json").read_text())["url"]
        began = time.monotonic()
        async with httpx.AsyncClient() as http:
            (await http.post(f"{url}/v1/server/drain", json={"deadline_s": 600})).raise_for_status()
        assert await asyncio.to_thread(process.wait, 30) == 0
        assert time.monotonic() - began < 30, "no episode was live"
    finally:
        process.kill()
        process.wait()
