"""The env server as a process, on real desktops: concurrent episodes, a killed desktop, and what is left behind."""

import asyncio
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path

import httpx
import pytest
from env_server_process import RunningServer, is_running, processes_below, running_env_server
from PIL import Image

from osworld_pipeline.agent.images import fit_size, prepare_screenshot
from osworld_pipeline.domain.task import Task
from osworld_pipeline.errors import NoCapacityError, ReplicaError
from osworld_pipeline.rollout.env_client import EnvClient, EnvTimeouts
from osworld_pipeline.wire import EnvConfig

pytestmark = [pytest.mark.desktop, pytest.mark.slow]

SCREEN = (640, 480)
MAX_PIXELS = 100_000
FILE_TASK = Task.from_config({
    "id": "make-file",
    "instruction": "Make the file ~/Desktop/a.txt that holds the word hello.",
    "config": [
        {"type": "launch", "parameters": {"command": ["xterm", "-T", "Work", "-geometry", "60x12+20+40"]}},
        {"type": "activate_window", "parameters": {"window_name": "Work"}},
    ],
    "evaluator": {
        "func": "check_include_exclude",
        "result": {"type": "vm_command_line", "command": "cat ~/Desktop/a.txt; ls ~/Desktop", "shell": True},
        "expected": {"type": "rule", "rules": {"include": ["hello\n", "a.txt"], "exclude": []}},
    },
})  # fmt: skip


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("images")


@pytest.fixture
def server(images: Path, tmp_path: Path) -> Iterator[RunningServer]:
    with running_env_server(
        tmp_path, "--screen-size", f"{SCREEN[0]}x{SCREEN[1]}", num_replicas=2, images=images, token="a secret"
    ) as running:
        yield running


def client_of(server: RunningServer) -> EnvClient:
    return EnvClient(server.url, token="a secret", env_config=EnvConfig(screen_size=SCREEN, require_terminal=True))


def overlay_mounts() -> set[str]:
    return {line for line in Path("/proc/self/mountinfo").read_text().splitlines() if "desktops" in line}


def wait_until(condition: Callable[[], bool], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


async def write_file(client: EnvClient, word: str) -> float:
    desktop = client.desktop()
    try:
        observation, info = await desktop.reset(FILE_TASK)
        assert observation.screenshot.startswith(b"\x89PNG")
        assert observation.accessibility_tree
        assert info.provider == "local"
        await desktop.act(f'pyautogui.write("echo {word} > ~/Desktop/a.txt")\npyautogui.press("enter")', pause_s=0.7)
        await desktop.act("DONE", pause_s=0.1)
        return await desktop.score()
    finally:
        await desktop.close()


async def test_screenshot_resized_by_the_server_equals_the_one_resized_by_the_client(
    server: RunningServer,
) -> None:
    seen = {}
    for image_size in (None, fit_size(*SCREEN, MAX_PIXELS)):
        config = EnvConfig(screen_size=SCREEN, require_a11y_tree=False, image_size=image_size)
        async with EnvClient(server.url, token="a secret", env_config=config) as client:
            desktop = client.desktop()
            observation, _ = await desktop.reset(FILE_TASK)
            prepared = prepare_screenshot(observation.screenshot, MAX_PIXELS, screen_size=observation.screen_size)
            seen[image_size] = observation, prepared
            await desktop.close()
    (whole, resized_here), (small, resized_there) = seen.values()
    assert (whole.screen_size, small.screen_size) == (None, SCREEN)
    assert resized_there.data == small.screenshot
    assert pixels_of(resized_there.data) == pixels_of(resized_here.data)
    assert resized_there.to_screen(10, 10) == resized_here.to_screen(10, 10)


def pixels_of(image: bytes) -> bytes:
    with Image.open(io.BytesIO(image)) as opened:
        return opened.convert("RGB").tobytes()


async def test_two_episodes_side_by_side_do_not_see_each_other(server: RunningServer) -> None:
    async with client_of(server) as client:
        assert await asyncio.gather(write_file(client, "hello"), write_file(client, "goodbye")) == [1.0, 0.0]


async def test_desktop_after_an_episode_is_fresh_and_soon_available(server: RunningServer) -> None:
    async with client_of(server) as client:
        assert await asyncio.gather(write_file(client, "hello"), write_file(client, "hello")) == [1.0, 1.0]
        desktop = client.desktop()
        await desktop.reset(FILE_TASK)
        await desktop.act("DONE", pause_s=0.0)
        assert await desktop.score() == 0.0
        await desktop.close()


async def test_killed_desktop_is_a_fault_and_capacity_is_back_within_5_s(server: RunningServer) -> None:
    async with client_of(server) as client:
        first, second = client.desktop(), client.desktop()
        before = processes_below(server.process.pid)
        await asyncio.gather(first.reset(FILE_TASK), second.reset(FILE_TASK))
        victims = processes_below(server.process.pid)
        assert victims & before
        for pid in victims:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        killed_at = time.monotonic()
        for desktop in (first, second):
            with pytest.raises(ReplicaError):
                await desktop.act('pyautogui.press("a")', pause_s=0.0)
        while [health.free for health in await client.health()] != [2]:
            assert time.monotonic() - killed_at < 5.0, server.log.read_text()[-2000:]
            await asyncio.sleep(0.05)
        await asyncio.gather(first.close(), second.close())
        assert await write_file(client, "hello") == 1.0


def test_term_leaves_no_process_no_mount_and_no_folder(images: Path, tmp_path: Path) -> None:
    mounts_before = overlay_mounts()
    with running_env_server(tmp_path, "--screen-size", "640x480", num_replicas=2, images=images) as server:
        files_before = {path.name for path in images.iterdir()}
        answer = httpx.post(f"{server.url}/reset", json={"task_config": dict(FILE_TASK.config)}, timeout=60)
        assert answer.status_code == 200, answer.text
        children = processes_below(server.process.pid)
        assert len(children) > 4
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) == 0
        deadline = time.monotonic() + 2.0
        while any(is_running(pid) for pid in children) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert [pid for pid in children if is_running(pid)] == []
        assert {path.name for path in images.iterdir()} == files_before
        assert list(server.temporary.iterdir()) == []
        assert overlay_mounts() == mounts_before


def test_desktops_of_a_killed_server_end_with_it(images: Path, tmp_path: Path) -> None:
    with running_env_server(tmp_path, "--screen-size", "640x480", images=images) as server:
        children = processes_below(server.process.pid)
        assert children
        server.process.kill()
        deadline = time.monotonic() + 5.0
        while any(is_running(pid) for pid in children) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert [pid for pid in children if is_running(pid)] == []


def test_term_ends_a_call_in_progress_and_everything_else_in_time(images: Path, tmp_path: Path) -> None:
    slow = {**FILE_TASK.config, "config": [{"type": "sleep", "parameters": {"seconds": 60}}]}
    options = ("--screen-size", "640x480", "--drain-timeout-s", "1")
    with running_env_server(tmp_path, *options, images=images) as server:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/reset", json={"task_config": slow}, timeout=0.3)
        with closing(HTTPConnection("127.0.0.1", int(server.url.rpartition(":")[2]), timeout=30)) as waiting:
            waiting.request("POST", "/reset", json.dumps({"task_config": slow}), {"Content-Type": "application/json"})
            time.sleep(0.5)
            children = processes_below(server.process.pid)
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(10) == 0
            assert [pid for pid in children if is_running(pid)] == []
            assert waiting.getresponse().status == 503


async def test_term_lets_a_step_finish_and_leaves_no_trace_of_any_episode(images: Path, tmp_path: Path) -> None:
    before = names_in(images), overlay_mounts()
    with running_env_server(tmp_path, "--screen-size", "640x480", images=images, num_replicas=2) as server:
        port = int(server.url.rpartition(":")[2])
        async with EnvClient(server.url, env_config=EnvConfig(screen_size=SCREEN)) as client:
            acting, idle = client.desktop(), client.desktop()
            await asyncio.gather(acting.reset(FILE_TASK), idle.reset(FILE_TASK))
            step = asyncio.create_task(acting.act('pyautogui.press("a")', pause_s=1.5))
            await asyncio.sleep(0.3)
            children = processes_below(server.process.pid)
            server.process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.3)
            async with EnvClient(server.url, timeouts=EnvTimeouts(capacity_s=0.1)) as late:
                with pytest.raises(NoCapacityError, match="shutting down"):
                    await late.desktop().reset(FILE_TASK)
            assert (await step).screenshot, "the step was answered"
            assert await asyncio.to_thread(server.process.wait, 10) == 0
        assert [pid for pid in children if is_running(pid)] == []
        assert (names_in(images), overlay_mounts()) == before
        assert names_in(server.temporary) == set()
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) != 0, "the port is free"


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_term_while_the_desktops_start_leaves_nothing(images: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "env_server.main", "--port", "0", "--replicas", "2", "--state-dir", str(images)]
    for delay_s in (0.6, 0.9, 1.2):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(delay_s)
        children = processes_below(process.pid)
        process.send_signal(signal.SIGTERM)
        process.wait(90)
        time.sleep(0.2)
        assert [pid for pid in children if is_running(pid)] == []


def start_with_parent(images: Path, ready: Path) -> subprocess.Popen[bytes]:
    """Starts a parent process whose only child is an env server that is given the parent's process id."""
    command = [
        sys.executable, "-m", "env_server.main", "--port", "0", "--screen-size", "640x480", "--state-dir", str(images),
        "--ready-file", str(ready), "--die-with-parent",
    ]  # fmt: skip
    script = f"import os, subprocess; subprocess.run([*{command!r}, str(os.getpid())])"
    return subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def test_server_dies_with_its_parent(images: Path, tmp_path: Path) -> None:
    parent = start_with_parent(images, tmp_path / "ready.json")
    wait_until((tmp_path / "ready.json").exists, 60)
    family = processes_below(parent.pid)
    assert len(family) > 2
    parent.kill()
    parent.wait()
    wait_until(lambda: not any(is_running(pid) for pid in family), 10)


def test_server_ends_when_its_parent_dies_before_the_server_has_started(images: Path, tmp_path: Path) -> None:
    parent = start_with_parent(images, tmp_path / "ready.json")
    wait_until(lambda: bool(processes_below(parent.pid)), 20)
    family = processes_below(parent.pid)
    parent.kill()
    parent.wait()
    wait_until(lambda: not any(is_running(pid) for pid in family), 20)


async def test_small_answers_are_not_held_back_by_the_socket(server: RunningServer) -> None:
    """Nagle's algorithm with delayed acknowledgements would cost 40 ms per call."""
    task = Task.from_config({"id": "t", "instruction": "Nothing.", "config": [], "evaluator": {"func": "infeasible"}})
    async with client_of(server) as client:
        desktop = client.desktop()
        await desktop.reset(task)
        times_s = []
        for _ in range(9):
            start = time.monotonic()
            await desktop.score()
            times_s.append(time.monotonic() - start)
        await desktop.close()
    # The delay would cost every call that much; a busy or slow machine costs most of them some time.
    assert min(times_s) < 0.04, times_s


async def test_client_that_hangs_up_during_reset_holds_no_replica(server: RunningServer) -> None:
    slow = {**FILE_TASK.config, "config": [{"type": "sleep", "parameters": {"seconds": 60}}]}
    async with client_of(server) as client, httpx.AsyncClient() as http:
        headers = {"Authorization": "Bearer a secret"}
        with pytest.raises(httpx.ReadTimeout):
            await http.post(f"{server.url}/reset", json={"task_config": slow}, headers=headers, timeout=0.3)
        assert [health.free for health in await client.health()] == [1]
        deadline = time.monotonic() + 5.0
        while [health.free for health in await client.health()] != [2]:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)
        assert [health.episodes for health in await client.health()] == [0]


def test_server_beyond_loopback_without_a_token_refuses_to_start_with_one_sentence(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "ENV_SERVER_TOKEN"}
    run = subprocess.run(
        [sys.executable, "-m", "env_server.main", "--host", "0.0.0.0", "--state-dir", str(tmp_path)],
        capture_output=True, text=True, env=environment, timeout=30,
    )  # fmt: skip
    assert run.returncode == 1
    assert run.stderr.strip().splitlines() == [
        "env-server: refusing to serve desktops on 0.0.0.0 without a token: set ENV_SERVER_TOKEN, or bind to 127.0.0.1"
    ]


def test_port_in_use_is_reported_at_once(server: RunningServer, tmp_path: Path) -> None:
    port = server.url.rpartition(":")[2]
    run = subprocess.run(
        [sys.executable, "-m", "env_server.main", "--port", port, "--state-dir", str(tmp_path)],
        capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    assert run.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in run.stderr
    assert len(run.stderr.strip().splitlines()) == 1
