"""Run by desktop-env's own Python: calls its controllers on a guest and prints, as one JSON object, what each answered.

Arguments: host, port, a scratch folder."""

import functools
import http.server
import json
import os
import sqlite3
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from desktop_env.controllers.python import PythonController
from desktop_env.controllers.setup import SetupController

HISTORY_TABLES = (
    "CREATE TABLE urls (id INTEGER PRIMARY KEY, url, title, visit_count, typed_count, last_visit_time, hidden)",
    "CREATE TABLE visits (id INTEGER PRIMARY KEY, url, visit_time, from_visit, transition, segment_id, visit_duration)",
)
ACTIONS: tuple[dict[str, Any], ...] = (
    {"action_type": "MOVE_TO", "parameters": {"x": 400, "y": 300}},
    {"action_type": "CLICK", "parameters": {"button": "left", "x": 400, "y": 300, "num_clicks": 2}},
    {"action_type": "MOUSE_DOWN", "parameters": {"button": "left"}},
    {"action_type": "MOUSE_UP", "parameters": {"button": "left"}},
    {"action_type": "DOUBLE_CLICK", "parameters": {"x": 400, "y": 300}},
    {"action_type": "RIGHT_CLICK", "parameters": {"x": 400, "y": 300}},
    {"action_type": "PRESS", "parameters": {"key": "esc"}},
    {"action_type": "DRAG_TO", "parameters": {"x": 500, "y": 300}},
    {"action_type": "SCROLL", "parameters": {"dx": 1, "dy": -1}},
    {"action_type": "KEY_DOWN", "parameters": {"key": "shift"}},
    {"action_type": "KEY_UP", "parameters": {"key": "shift"}},
    {"action_type": "HOTKEY", "parameters": {"keys": ["ctrl", "end"]}},
    {"action_type": "TYPING", "parameters": {"text": "it's \\ typed"}},
    {"action_type": "HOTKEY", "parameters": {"keys": ["ctrl", "s"]}},
)
reported: dict[str, Any] = {}


def report(name: str, call: Callable[[], Any]) -> None:
    start = time.monotonic()
    try:
        answer = call()
    except Exception as error:  # noqa: BLE001 - any error is the answer
        traceback.print_exc()
        answer = {"crash": f"{type(error).__name__}: {error}"}
    print(f"{time.monotonic() - start:.2f} s {name}", file=sys.stderr)
    reported[name] = f"{len(answer)} bytes {answer[:4].hex()}" if isinstance(answer, bytes) else answer


def main() -> None:
    host, port, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    controller = PythonController(vm_ip=host, server_port=port)
    controller.retry_interval = 0.1
    setup = SetupController(
        vm_ip=host, server_port=port, cache_dir=str(folder), client_password="password", screen_width=1280,
        screen_height=720,
    )  # fmt: skip
    call_set_up(setup, controller, folder)
    call_controller(controller, setup, folder)
    print(json.dumps(reported))


def call_set_up(setup: SetupController, controller: PythonController, folder: Path) -> None:
    (folder / "local.txt").write_text("uploaded")
    (folder / "served.txt").write_text("downloaded")
    wallpaper = "from PIL import Image; Image.new('RGB', (8, 8), 'red').save('/home/user/red.png')"
    files = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    web = http.server.ThreadingHTTPServer(("127.0.0.1", 0), files)
    threading.Thread(target=web.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{web.server_port}/served.txt"

    def verb(name: str, **parameters: Any) -> None:
        config = [{"type": name, "parameters": parameters}]
        report(f"setup {name}", lambda: setup.setup(config))

    verb("upload_file", files=[{"local_path": str(folder / "local.txt"), "path": "/home/user/deep/a.txt"}])
    verb("download", files=[{"url": url, "path": "/home/user/b.txt"}])
    verb(
        "execute", command=["echo", "{SCREEN_WIDTH_HALF} {CLIENT_PASSWORD}"], stdout="out.txt", until={"returncode": 0}
    )
    verb("command", command="echo $((1+1)) > /home/user/c.txt", shell=True)
    verb("launch", command="mousepad /home/user/deep/a.txt")
    verb("execute_with_verification", command=["true"], verification={"window_exists": "a.txt"}, max_wait_time=20)
    verb("activate_window", window_name="a.txt")
    verb("sleep", seconds=0.1)
    report("window", lambda: controller.get_vm_window_size("mousepad"))
    verb("close_window", window_name="a.txt")
    report("closed", lambda: gone(controller, "mousepad"))
    verb("open", path="/home/user/b.txt")
    report("run python", lambda: controller.run_python_script(wallpaper))
    verb("change_wallpaper", path="/home/user/red.png")
    database = sqlite3.connect(folder / "history_new.sqlite")
    for table in HISTORY_TABLES:
        database.execute(table)
    database.commit()
    database.close()
    visit = {"url": "http://a.test", "title": "A", "visit_time_from_now_in_seconds": 60}
    verb("update_browse_history", history=[visit])
    reported["kept"] = (folder / "out.txt").read_text()
    web.shutdown()


def gone(controller: PythonController, name: str) -> bool:
    controller.retry_times = 1
    until = time.monotonic() + 10
    while controller.get_vm_window_size(name) is not None and time.monotonic() < until:
        time.sleep(0.1)
    controller.retry_times = 3
    return time.monotonic() < until


def call_controller(controller: PythonController, setup: SetupController, folder: Path) -> None:
    for path in ("/home/user/deep/a.txt", "/home/user/b.txt", "/home/user/c.txt", "/home/user/none"):
        report(f"file {path}", lambda path=path: (controller.get_file(path) or b"none").decode())
    report("screenshot", controller.get_screenshot)
    report("tree", lambda: controller.get_accessibility_tree()[:40])
    report("command", lambda: controller.execute_python_command("print(6*7)"))
    report("script error", lambda: controller.run_python_script("1/0"))
    report("bash", lambda: controller.run_bash_script("pwd\nexit 3", timeout=10, working_dir="/tmp"))
    controller.retry_times = 1
    report("bash limit", lambda: controller.run_bash_script("sleep 20", timeout=1))
    controller.retry_times = 3
    report("platform", controller.get_vm_platform)
    report("screen", controller.get_vm_screen_size)
    report("desktop", controller.get_vm_desktop_path)
    report("folder", lambda: controller.get_vm_directory_tree("/home/user/deep"))
    report("wallpaper", controller.get_vm_wallpaper)
    report("history", lambda: controller.run_bash_script("ls -l ~/.config/google-chrome/Default/History"))
    report("recording", controller.start_recording)
    act(controller, setup)
    report("recorded", lambda: controller.end_recording(str(folder / "video.mp4")))
    video = folder / "video.mp4"
    reported["video"] = video.read_bytes()[4:8].decode("latin-1") if video.exists() else "none"
    setup.setup([{"type": "launch", "parameters": {"command": ["xterm", "-e", "echo in the terminal; sleep 30"]}}])
    time.sleep(1.0)
    report("terminal", controller.get_terminal_output)


def act(controller: PythonController, setup: SetupController) -> None:
    controller.run_bash_script("printf start > /home/user/d.txt")
    setup.setup([{"type": "open", "parameters": {"path": "/home/user/d.txt"}}])
    time.sleep(1.0)
    for index, action in enumerate(ACTIONS):
        report(f"action {index} {action['action_type']}", lambda action=action: controller.execute_action(action))
    time.sleep(0.5)
    report("typed", lambda: (controller.get_file("/home/user/d.txt") or b"none").decode())


if __name__ == "__main__":
    os.environ.pop("DISPLAY", None)
    main()
