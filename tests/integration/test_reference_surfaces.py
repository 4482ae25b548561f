"""OSGym's and AReaL's surfaces over real desktops: input arrives as requested, to the pixel and to the character."""

import base64
import io
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from env_server_process import RunningServer, is_running, processes_below, running_env_server
from PIL import Image

pytestmark = [pytest.mark.desktop, pytest.mark.slow]

SCREEN = (640, 480)
TEXT = "a, b & c (d); 'e' \"f\" \\n $HOME `g` & click(1,2) 50% \u00e4\u20ac"
WATCHER = r"""
from Xlib import X
from Xlib.display import Display

display = Display()
screen = display.screen()
window = screen.root.create_window(
    0, 0, screen.width_in_pixels, screen.height_in_pixels, 0, X.CopyFromParent, override_redirect=True,
    background_pixel=screen.white_pixel,
    event_mask=X.ButtonPressMask | X.ButtonReleaseMask | X.KeyPressMask | X.ExposureMask,
)
window.map()
with open("/tmp/events", "w", buffering=1) as log:
    while True:
        event = display.next_event()
        if event.type == X.Expose:
            window.set_input_focus(X.RevertToParent, X.CurrentTime)
            display.sync()
        elif event.type == X.KeyPress:
            print("key", display.keycode_to_keysym(event.detail, 0), file=log)
        elif event.type in (X.ButtonPress, X.ButtonRelease):
            what = "press" if event.type == X.ButtonPress else "release"
            print(what, event.detail, event.root_x, event.root_y, file=log)
"""
"""Notes every button and key that reaches the screen, and where."""


def watching_task(expected: list[str]) -> dict[str, Any]:
    upload = {"files": [{"path": "/tmp/watcher.py", "content": WATCHER}]}
    return {
        "id": "watch",
        "instruction": "Do it.",
        "config": [
            {"type": "upload_file", "parameters": upload},
            {"type": "launch", "parameters": {"command": ["/usr/bin/python3", "/tmp/watcher.py"]}},
        ],
        "evaluator": {
            "func": "exact_match",
            "result": {"type": "vm_command_line", "command": "cat /tmp/events", "shell": True},
            "expected": {"type": "rule", "rules": {"expected": "".join(f"{line}\n" for line in expected)}},
        },
    }


TYPING_TASK = {
    "id": "type",
    "instruction": "Type it.",
    "config": [
        {"type": "launch", "parameters": {"command": ["xterm", "-T", "Work", "-e", "cat > /tmp/typed"]}},
        {"type": "activate_window", "parameters": {"window_name": "Work"}},
    ],
    "evaluator": {
        "func": "exact_match",
        "result": {"type": "vm_command_line", "command": "cat /tmp/typed", "shell": True},
        "expected": {"type": "rule", "rules": {"expected": f"{TEXT}\n"}},
    },
}
SLOW_TASK = {
    "id": "slow",
    "instruction": "Wait.",
    "config": [{"type": "sleep", "parameters": {"seconds": 60}}],
    "evaluator": {"func": "infeasible"},
}


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@dataclass(frozen=True, kw_only=True)
class Workers:
    server: RunningServer
    ports: list[int]


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    ports = free_ports(2)
    options = ["--screen-size", f"{SCREEN[0]}x{SCREEN[1]}", "--osgym-ports", ",".join(map(str, ports))]
    options += ["--osgym-replicas-per-port", "1", "--osgym-pause-s", "0.3", "--queue-timeout-s", "2"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OSGYM_ALLOWED_IPS", "127.0.0.1")
        with running_env_server(tmp_path_factory.mktemp("surfaces"), *options, num_replicas=2) as server:
            yield Workers(server=server, ports=ports)


@pytest.fixture
def osgym(workers: Workers) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://127.0.0.1:{workers.ports[0]}", timeout=60, trust_env=False) as http:
        yield http
        http.post("/shutdown", json={"vm_id": "all"})


def reset(http: httpx.Client, task: dict[str, Any]) -> int:
    answer = http.post("/reset", json={"task_config": task, "timeout": 100})
    assert answer.status_code == 200, answer.text
    image = Image.open(io.BytesIO(base64.b64decode(answer.json()["screenshot"])))
    assert (image.format, image.size) == ("PNG", SCREEN)
    return answer.json()["vm_id"]


def act(http: httpx.Client, vm_id: int, action: str) -> dict[str, Any]:
    answer = http.post("/step", json={"action": action, "vm_id": vm_id})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_mouse_and_keys_arrive_where_they_should(osgym: httpx.Client) -> None:
    def click(button: int, x: int, y: int) -> list[str]:
        return [f"press {button} {x} {y}", f"release {button} {x} {y}"]

    expected = [
        *click(1, 100, 120),
        *click(1, 200, 50) * 2,
        *click(3, 0, 479),
        "press 1 50 60",
        "release 1 300 310",
        *click(5, 320, 240) * 3,
        *click(4, 320, 240) * 50,
        "key 65507",
        "key 65505",
        "key 115",
        "key 65293",
        *click(1, 7, 8),
        "key 120",
    ]
    vm_id = reset(osgym, watching_task(expected))
    actions = ("click(100,120)", "left_double(200,50)", "right_single(0,479)", "drag(50,60,300,310)")
    actions += ("scroll(320,240,-3)", "scroll(320,240,up)", "hotkey(ctrl,shift,s)", "press(enter)")
    for action in (*actions, "click(7,8)&type(x)", "move(1,1)"):
        assert act(osgym, vm_id, action)["is_finish"] is False
    assert act(osgym, vm_id, "finish()")["reward"] == 1.0


def test_typed_text_arrives_to_the_character(osgym: httpx.Client) -> None:
    vm_id = reset(osgym, TYPING_TASK)
    act(osgym, vm_id, f"type({TEXT})&press(enter)&hotkey(ctrl,d)")
    assert act(osgym, vm_id, "finish()")["reward"] == 1.0


def test_each_port_has_its_own_share_of_desktops_and_its_own_vm_ids(osgym: httpx.Client, workers: Workers) -> None:
    vm_id = reset(osgym, TYPING_TASK)
    full = osgym.post("/reset", json={"task_config": TYPING_TASK, "timeout": 100})
    assert (full.status_code, full.json()["fault"]) == (503, "no_capacity")
    other = f"http://127.0.0.1:{workers.ports[1]}"
    assert httpx.post(f"{other}/step", json={"action": "wait()", "vm_id": vm_id}, timeout=10).status_code == 400
    assert httpx.post(f"{other}/shutdown", json={"vm_id": "all"}, timeout=10).status_code == 200
    assert act(osgym, vm_id, "wait()")["is_finish"] is False


def test_client_that_hangs_up_during_reset_holds_neither_desktop_nor_share(
    osgym: httpx.Client, workers: Workers
) -> None:
    with pytest.raises(httpx.ReadTimeout):
        osgym.post("/reset", json={"task_config": SLOW_TASK, "timeout": 100}, timeout=0.5)
    reset(osgym, TYPING_TASK)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{workers.server.url}/osgym/reset", json={"task_config": SLOW_TASK, "timeout": 100}, timeout=0.5)
    deadline = time.monotonic() + 5
    while httpx.get(f"{workers.server.url}/health").json()["free"] != 1:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_killed_desktop_is_a_fault_and_its_share_is_available_again(osgym: httpx.Client, workers: Workers) -> None:
    vm_id = reset(osgym, TYPING_TASK)
    for pid in processes_below(workers.server.process.pid):
        try:
            os.kill(pid, 9)
        except ProcessLookupError:
            continue
    answer = osgym.post("/step", json={"action": "finish()", "vm_id": vm_id})
    assert (answer.status_code, answer.json()["fault"]) == (400, "env_fault")
    assert "reward" not in answer.json()
    assert reset(osgym, TYPING_TASK) != vm_id


def test_areals_code_snippets_run_and_its_session_is_returned(workers: Workers) -> None:
    task = watching_task(["press 1 30 40", "release 1 30 40", "key 104", "key 105"])
    with httpx.Client(base_url=workers.server.url, timeout=60, trust_env=False) as http:
        session = f"/envs/{http.post('/envs', json={'screen_size': SCREEN}).json()['session_id']}"
        obs = http.post(f"{session}/reset", json={"task_config": task}).json()["obs"]
        assert Image.open(io.BytesIO(base64.b64decode(obs["screenshot_b64"]))).size == SCREEN
        snippet = "import pyautogui\nimport time\npyautogui.click(30, 40)\ntime.sleep(0.1)\npyautogui.write('hi')"
        reported = http.post(f"{session}/step", json={"action": snippet, "pause": 0.2}).json()
        assert (reported["reward"], reported["done"]) == (0.0, False)
        assert http.post(f"{session}/evaluate", json={}).json() == {"reward": 1.0}
        assert http.post(f"{session}/close", json={}).json() == {"ok": True}
        deadline = time.monotonic() + 5
        while http.get("/health").json()["active_sessions"]:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_start_and_stop_touch_only_what_they_started(workers: Workers, tmp_path: Path) -> None:
    """Runs next to a server that another process started, on the same image."""
    (tmp_path / "config.yaml").write_text(f"ports: {free_ports(2)}\n")
    environment = {**os.environ, "OSGYM_ALLOWED_IPS": "127.0.0.1"}
    base = [sys.executable, "-m", "env_server.main", "osgym"]
    state = ["--state-dir", str(workers.server.state_dir)]

    def osgym_command(*words: str) -> tuple[int, str]:
        run = subprocess.run([*base, *words, *state], capture_output=True, text=True, env=environment, timeout=100)
        return run.returncode, run.stdout + run.stderr

    start = ["start", "--config", str(tmp_path / "config.yaml"), "--local", "--replicas-per-port", "1"]
    start += ["--screen-size", "640x480"]
    assert osgym_command(*start)[0] == 0
    try:
        pid = json.loads((workers.server.state_dir / "osgym.json").read_text())["pid"]
        family = processes_below(pid) | {pid}
        status, said = osgym_command("status")
        assert status == 0
        assert "0 episodes, 2 of 2 replicas free" in said
        status, said = osgym_command(*start)
        assert status == 0
        assert "already running" in said
    finally:
        status, said = osgym_command("stop")
    assert (status, said) == (0, f"OSGym's workers are stopped (process {pid})\n")
    assert [pid for pid in family if is_running(pid)] == []
    assert workers.server.process.poll() is None
    assert httpx.get(f"{workers.server.url}/health").json()["replicas"] == 2
