"""Tasks of OSWorld itself, as published, on our desktop: their own set-up and their own evaluators, over HTTP.

Each is tried twice: doing nothing scores 0, and doing the task through the agent's own actions scores 1.
"""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from env_server_process import running_env_server

from osworld_pipeline.domain.task import Task
from osworld_pipeline.errors import EvaluatorError, ReplicaError
from osworld_pipeline.rollout.env_client import EnvClient

pytestmark = [pytest.mark.desktop, pytest.mark.slow]

NUM_REPLICAS = 2


@dataclass(frozen=True, kw_only=True)
class Solution:
    """What solves a task: lines typed into a terminal that is opened by its shortcut, and the last action."""

    task_id: str
    lines: tuple[str, ...] = ()
    last_action: str = "DONE"


SOLUTIONS = (
    Solution(
        task_id="e0df059f-28a6-4169-924f-b9623e7184cc",
        lines=("mv ~/Desktop/todo_list_Jan_1 ~/Desktop/todo_list_Jan_2",),
    ),
    Solution(task_id="7688b85f-87a4-4e4a-b2f8-f3d6c3f29b82", lines=("mv ~/Desktop/todo.txt ~/Desktop/done/",)),
    Solution(task_id="cc9d4f34-1ca0-4a1b-8ff2-09302696acb9", lines=("pkill -f my_process.sh",)),
    Solution(task_id="43c2d64c-bab5-4dcb-a30c-b888321c319a", lines=("sudo mkdir /test", "password")),
    Solution(
        task_id="bedcedc4-4d72-425e-ad62-21960b11fe0d",
        lines=("gsettings set org.gnome.desktop.session idle-delay 0",),
    ),
    Solution(
        task_id="3ce045a0-877b-42aa-8d2c-b4a863336ab8",
        lines=("gsettings set org.gnome.desktop.interface text-scaling-factor 1.5",),
    ),
    Solution(
        task_id="f9be0997-4b7c-45c5-b05c-4612b44a6118",
        lines=("gsettings set org.gnome.desktop.notifications show-banners false",),
    ),
    Solution(task_id="4783cc41-c03c-4e1b-89b4-50658f642bd5", last_action="FAIL"),
    Solution(task_id="a462a795-fdc7-4b23-b689-e8b6df786b78", last_action="FAIL"),
    Solution(task_id="b3d4a89c-53f2-4d6b-8b6a-541fb5d205fa", last_action="FAIL"),
    Solution(task_id="c288e301-e626-4b98-a1ab-159dcb162af5", last_action="FAIL"),
    Solution(task_id="fe41f596-a71b-4c2f-9b2f-9dcd40b568c3", last_action="FAIL"),
)


@pytest.fixture(scope="module")
def server_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_env_server(tmp_path_factory.mktemp("osworld"), num_replicas=NUM_REPLICAS) as server:
        yield server.url


def read_task(real_data: Path, task_id: str) -> Task:
    path = real_data / "osworld" / "evaluation_examples" / "examples" / "os" / f"{task_id}.json"
    if not path.exists():
        pytest.skip(f"the published task {task_id} is not here")
    return Task.from_config(json.loads(path.read_text()), domain="os")


async def attempt(client: EnvClient, task: Task, lines: tuple[str, ...], last_action: str) -> float:
    desktop = client.desktop()
    try:
        await desktop.reset(task)
        if lines:
            await desktop.act('pyautogui.hotkey("ctrl", "alt", "t")', pause_s=1.5)
        for line in lines:
            await desktop.act(f'pyautogui.write({line!r}); pyautogui.press("enter")', pause_s=1.0)
        await desktop.act(last_action, pause_s=0.2)
        return await desktop.score()
    finally:
        await desktop.close()


@pytest.mark.parametrize("solution", SOLUTIONS, ids=lambda solution: solution.task_id[:8])
async def test_published_task_scores_0_when_nothing_is_done_and_1_when_it_is_done(
    solution: Solution, server_url: str, real_data: Path
) -> None:
    task = read_task(real_data, solution.task_id)
    async with EnvClient(server_url) as client:
        idle, done = await asyncio.gather(
            attempt(client, task, (), "DONE"), attempt(client, task, solution.lines, solution.last_action)
        )
    assert (idle, done) == (0.0, 1.0)


async def test_giving_up_on_a_feasible_task_scores_0_even_when_it_is_done(server_url: str, real_data: Path) -> None:
    task = read_task(real_data, "7688b85f-87a4-4e4a-b2f8-f3d6c3f29b82")
    async with EnvClient(server_url) as client:
        assert await attempt(client, task, ("mv ~/Desktop/todo.txt ~/Desktop/done/",), "FAIL") == 0.0


async def test_task_that_this_desktop_cannot_grade_is_a_fault_and_not_a_zero(server_url: str, real_data: Path) -> None:
    """The task checks the favourites of GNOME's shell, which is not installed: its evaluator has nothing to read."""
    task = read_task(real_data, "ec4e3f68-9ea4-4c18-a5c9-69f89d1178b3")
    async with EnvClient(server_url) as client:
        with pytest.raises(EvaluatorError, match="check_gnome_favorite_apps"):
            await attempt(client, task, (), "DONE")


async def test_task_that_downloads_from_a_host_that_is_not_allowed_is_a_fault_of_its_set_up(server_url: str) -> None:
    task = Task.from_config(
        {
            "id": "download",
            "instruction": "Read it.",
            "config": [
                {"type": "download", "parameters": {"files": [{"url": "http://unknown.test/a", "path": "/tmp/a"}]}}
            ],
            "evaluator": {"func": "infeasible"},
        }
    )
    async with EnvClient(server_url) as client:
        with pytest.raises(ReplicaError, match=r"downloads from unknown\.test are not allowed"):
            await attempt(client, task, (), "DONE")
