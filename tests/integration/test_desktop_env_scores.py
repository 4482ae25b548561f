"""OSWorld's own evaluators on our local desktops give the same rewards as our own graders, on published tasks.
DesktopEnv's whole loop runs over HTTP, with our desktops as its virtual machines."""

import base64
import io
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from desktop_env_place import find_python
from env_server_process import RunningServer, running_env_server
from PIL import Image, ImageDraw
from test_real_osworld_tasks import SOLUTIONS, attempt, read_task

from env_server.driving.download import Downloader
from env_server.driving.guest_driver import Graders, GuestDrivers, OwnGraders
from env_server.evaluators.episode_cache import EpisodeCache
from env_server.providers.desktop_env.graders import OSWorldGraders
from env_server.providers.local.provider import LocalDesktop, LocalProvider
from env_server.settings import TaskLimits
from osworld_pipeline.domain.task import Task
from osworld_pipeline.errors import EvaluatorError, ReplicaError, TaskError
from osworld_pipeline.rollout.env_client import EnvClient

pytestmark = [
    pytest.mark.desktop_env, pytest.mark.desktop, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"),
]  # fmt: skip

SLOW = "cc9d4f34-1ca0-4a1b-8ff2-09302696acb9"
"""Its grading waits for five seconds, six times over here."""
DONE_BY_COMMANDS = [solution for solution in SOLUTIONS if solution.lines and solution.task_id != SLOW]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("images")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def desktop(images: Path) -> AsyncIterator[LocalDesktop]:
    provider = LocalProvider(images=images, screen_size=(1280, 720))
    try:
        yield await provider.start("replica-0")
    finally:
        await provider.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def osworld(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[OSWorldGraders]:
    graders = OSWorldGraders(python=find_python(), folder=tmp_path_factory.mktemp("graders"))
    yield graders
    await graders.close()


async def score(graders: Graders, task: Task, desktop: LocalDesktop, last_action: str, *, prepare: bool) -> float:
    limits = TaskLimits()
    drivers = GuestDrivers(limits=limits, downloader=Downloader(limits), screen=(1280, 720), graders=graders)
    driver = drivers.plan(task.config).drive(desktop)
    if prepare:
        await driver.prepare()
    try:
        return await driver.evaluate(last_action=last_action)
    finally:
        await drivers.downloader.close()


async def test_osworlds_scores_of_published_tasks_equal_our_own(
    osworld: OSWorldGraders, desktop: LocalDesktop, real_data: Path
) -> None:
    scores: dict[str, Any] = {}
    for solution in DONE_BY_COMMANDS:
        task = read_task(real_data, solution.task_id)
        idle = [
            await score(OwnGraders(), task, desktop, "DONE", prepare=True),
            await score(osworld, task, desktop, "DONE", prepare=False),
        ]
        command, *typed = solution.lines
        if typed:  # a password
            command = f"echo {typed[0]} | {command.replace('sudo', 'sudo -S')}"
        await desktop.guest.execute(command, shell=True)
        kinds = ((OwnGraders(), "DONE"), (osworld, "DONE"), (OwnGraders(), "FAIL"), (osworld, "FAIL"))
        solved = [await score(graders, task, desktop, last, prepare=False) for graders, last in kinds]
        scores[solution.task_id[:8]] = (*idle, *solved)
        await desktop.reset()
    assert scores == {solution.task_id[:8]: (0.0, 0.0, 1.0, 1.0, 0.0, 0.0) for solution in DONE_BY_COMMANDS}


async def test_giving_up_solves_an_infeasible_task(
    osworld: OSWorldGraders, desktop: LocalDesktop, real_data: Path
) -> None:
    task = read_task(real_data, "b3d4a89c-53f2-4d6b-8b6a-541fb5d205fa")
    for graders in (OwnGraders(), osworld):
        assert await score(graders, task, desktop, "FAIL", prepare=False) == 1.0
        assert await score(graders, task, desktop, "DONE", prepare=False) == 0.0


async def test_task_that_this_desktop_cannot_show_is_a_fault_for_both_graders(
    osworld: OSWorldGraders, desktop: LocalDesktop, real_data: Path
) -> None:
    task = read_task(real_data, "ec4e3f68-9ea4-4c18-a5c9-69f89d1178b3")
    for graders in (OwnGraders(), osworld):
        with pytest.raises(EvaluatorError):
            await score(graders, task, desktop, "DONE", prepare=False)


def picture(colour: str) -> str:
    image = Image.new("RGB", (64, 48), "white")
    ImageDraw.Draw(image).ellipse((8, 8, 40, 40), fill=colour)
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def task_of(func: str, result: Any, expected: Any, *files: tuple[str, str]) -> Task:
    uploads = [{"path": path, "content_base64": content} for path, content in files]
    return Task.from_config(
        {
            "id": func,
            "instruction": "Do it.",
            "config": [{"type": "upload_file", "parameters": {"files": uploads}}],
            "evaluator": {"func": func, "result": result, "expected": expected},
        }
    )


async def test_metric_that_only_osworld_has_is_scored(osworld: OSWorldGraders, desktop: LocalDesktop) -> None:
    """Structural similarity of two pictures, by scikit-image."""
    actual = {"type": "vm_file", "path": "/home/user/a.png", "dest": "a.png"}
    expected = {"type": "vm_file", "path": "/home/user/b.png", "dest": "b.png"}
    for colour, reward in (("red", 1.0), ("black", 0.0)):
        files = (("/home/user/a.png", picture(colour)), ("/home/user/b.png", picture("red")))
        task = task_of("check_structure_sim", actual, expected, *files)
        assert await score(osworld, task, desktop, "DONE", prepare=True) == reward
    with pytest.raises(TaskError, match="check_structure_sim"):
        OwnGraders().read(task)


async def test_file_saved_by_set_up_is_read_by_osworlds_getter(osworld: OSWorldGraders, desktop: LocalDesktop) -> None:
    task = Task.from_config(
        {
            "id": "kept",
            "instruction": "Do it.",
            "config": [{"type": "execute", "parameters": {"command": ["echo", "one"], "stdout": "kept.txt"}}],
            "evaluator": {
                "func": "compare_text_file",
                "result": {"type": "cache_file", "path": "kept.txt"},
                "expected": {"type": "cache_file", "path": "kept.txt"},
            },
        }
    )
    assert await score(osworld, task, desktop, "DONE", prepare=True) == 1.0


async def test_missing_file_scores_zero_by_osworlds_own_rule(osworld: OSWorldGraders, desktop: LocalDesktop) -> None:
    rule = {"type": "rule", "rules": {"expected": ["a"]}}
    missing = {"type": "vm_file", "path": "/home/user/none.txt", "dest": "a.txt"}
    assert await score(osworld, task_of("file_contains", missing, rule), desktop, "DONE", prepare=False) == 0.0


async def test_crash_of_osworlds_evaluator_is_not_a_reward(osworld: OSWorldGraders, desktop: LocalDesktop) -> None:
    said = {"type": "vm_command_line", "command": ["echo", "no", "list"]}
    rule = {"type": "rule", "rules": {"expected": ["a"]}}
    with pytest.raises(EvaluatorError, match="SyntaxError"):
        await score(osworld, task_of("check_gnome_favorite_apps", said, rule), desktop, "DONE", prepare=False)


async def test_desktop_that_dies_is_not_a_reward(osworld: OSWorldGraders, images: Path) -> None:
    task = task_of("file_contains", {"type": "vm_file", "path": "/home/user/a", "dest": "a"}, {"type": "rule"})
    provider = LocalProvider(images=images, screen_size=(1280, 720))
    try:
        desktop = await provider.start("replica-1")
        guest = desktop.guest
        await desktop.stop()
        with pytest.raises(ReplicaError):
            await osworld.read(task).grade(guest, EpisodeCache(), last_action=None)
    finally:
        await provider.close()


# DesktopEnv's whole loop, over HTTP


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, images: Path) -> Iterator[RunningServer]:
    python = find_python()
    options = ("--provider", "desktop_env", "--desktop-env-provider", "local", "--desktop-env-python", str(python))
    folder = tmp_path_factory.mktemp("server")
    with running_env_server(folder, *options, "--screen-size", "1280x720", images=images) as running:
        yield running


async def test_desktop_env_runs_our_desktops_over_http(server: RunningServer, real_data: Path) -> None:
    async with EnvClient(server.url) as client:
        solution = DONE_BY_COMMANDS[0]
        task = read_task(real_data, solution.task_id)
        assert await attempt(client, task, (), "DONE") == 0.0
        assert await attempt(client, task, solution.lines, "DONE") == 1.0


async def test_episode_names_the_release_that_scored_it(server: RunningServer, real_data: Path) -> None:
    task = read_task(real_data, DONE_BY_COMMANDS[0].task_id)
    async with EnvClient(server.url) as client:
        desktop = client.desktop()
        observation, info = await desktop.reset(task)
        await desktop.close()
    assert info.provider == "desktop_env"
    assert info.grader_version.startswith("desktop-env-1.0.2+")
    assert Image.open(io.BytesIO(observation.screenshot)).size == (1280, 720)
