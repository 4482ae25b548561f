"""Runs desktop-env's own controllers against our local desktop, with every call that they can make to a guest."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from desktop_env_place import find_python

from env_server.providers.desktop_env.install import SEARCH_PATH
from env_server.providers.local.provider import LocalProvider
from env_server.tcp_forward import tcp_forward

pytestmark = [pytest.mark.desktop_env, pytest.mark.desktop, pytest.mark.slow]

PROGRAM = Path(__file__).with_name("desktop_env_calls.py")
START = "import runpy, sys; sys.path.append(sys.argv[4]); runpy.run_path(sys.argv[5], run_name='__main__')"


async def call_everything(folder: Path) -> dict[str, Any]:
    python = find_python()
    provider = LocalProvider(images=folder / "images", screen_size=(1280, 720))
    (folder / "scratch").mkdir()
    try:
        desktop = await provider.start("replica-0")
        async with tcp_forward(desktop.guest) as (host, port):
            arguments = [host, str(port), str(folder / "scratch"), str(SEARCH_PATH[0]), str(PROGRAM)]
            process = await asyncio.create_subprocess_exec(
                str(python), "-Ic", START, *arguments, cwd=folder, stdout=-1, stderr=-1
            )
            output, complaints = await process.communicate()
    finally:
        await provider.close()
    assert process.returncode == 0, complaints.decode()[-3000:]
    return json.loads(output.decode().strip().splitlines()[-1])


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return asyncio.run(call_everything(tmp_path_factory.mktemp("controllers")))


def test_every_controller_call_is_answered(reported: dict[str, Any]) -> None:
    crashed = {name: answer for name, answer in reported.items() if isinstance(answer, dict) and "crash" in answer}
    assert crashed == {}
    set_up = {name: answer for name, answer in reported.items() if name.startswith("setup ")}
    assert len(set_up) == 12
    assert all(answer is True for answer in set_up.values())


def test_every_set_up_step_takes_effect(reported: dict[str, Any]) -> None:
    assert reported["file /home/user/deep/a.txt"] == "uploaded"
    assert reported["file /home/user/b.txt"] == "downloaded"
    assert reported["file /home/user/c.txt"] == "2\n"
    assert reported["file /home/user/none"] == "none"
    assert reported["kept"] == "640 password\n"
    assert reported["window"] == {"width": 640, "height": 480}
    assert reported["closed"] is True
    assert reported["history"]["returncode"] == 0


def test_controller_sees_the_desktop(reported: dict[str, Any]) -> None:
    assert reported["screenshot"].endswith("89504e47")
    assert reported["wallpaper"].endswith("89504e47")
    assert reported["tree"].startswith("<desktop-frame")
    assert reported["platform"] == "Linux"
    assert reported["screen"] == {"width": 1280, "height": 720}
    assert reported["desktop"] == "/home/user/Desktop"
    assert reported["folder"] == {"type": "directory", "name": "deep", "children": [{"type": "file", "name": "a.txt"}]}
    assert "in the terminal" in reported["terminal"]
    assert reported["video"] == ("ftyp" if shutil.which("ffmpeg") else "none"), "an MP4, where the desktop can record"


def test_controller_runs_commands(reported: dict[str, Any]) -> None:
    assert reported["command"]["output"] == "42\n"
    assert "ZeroDivisionError" in reported["script error"]["error"]
    assert (reported["bash"]["output"], reported["bash"]["returncode"]) == ("/tmp\n", 3)
    assert reported["bash limit"]["status"] == "error"


def test_actions_of_computer_13_reach_the_screen(reported: dict[str, Any]) -> None:
    assert reported["typed"] == "startit's \\ typed"
