"""Recording on a fake desktop: what becomes a demonstration, what is tried again, and what stops everything."""

import io
from collections.abc import Callable
from typing import Any

import pytest
from PIL import Image

from osworld_pipeline.domain.observation import Observation
from osworld_pipeline.domain.task import Task
from osworld_pipeline.errors import DatasetError, EnvServerError, EvaluatorError, ReplicaError
from osworld_pipeline.evaluation.suites import SuiteTask, build_suite
from osworld_pipeline.protocols import DesktopInfo
from osworld_pipeline.recipes.schema import AgentSection
from osworld_pipeline.runs.sources.record_demonstrations import Recording, RecordProgress, play_episode, record

SUITE = build_suite(seed=0, families=["rename_folder", "click_button"], num_train=10, num_heldout=1, screen=(1024, 640))
AGENT = AgentSection(max_turns=4, max_pixels=512 * 320, system_prompt="short")
INFO = DesktopInfo(replica_id="fake-0", provider="fake", image_digest="0", grader_version="0")


def png(width: int, height: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), "navy").save(buffer, format="PNG")
    return buffer.getvalue()


SCREENSHOT = Observation(screenshot=png(1024, 640))


class FakeDesktop:
    """Solves every task, unless it is set to fail."""

    def __init__(
        self, *, reward: float = 1.0, reset_error: Exception | None = None, score_error: Exception | None = None
    ):
        self.commands: list[str] = []
        self.pauses_s: list[float] = []
        self.is_closed = False
        self._reward, self._reset_error, self._score_error = reward, reset_error, score_error

    async def reset(self, task: Task, *, record_id: str = "") -> tuple[Observation, DesktopInfo]:
        if self._reset_error:
            raise self._reset_error
        return SCREENSHOT, INFO

    async def act(self, command: str, *, pause_s: float, note: str = "") -> Observation:
        self.commands.append(command)
        self.pauses_s.append(pause_s)
        return SCREENSHOT

    async def score(self) -> float:
        if self._score_error:
            raise self._score_error
        return self._reward

    async def close(self) -> None:
        self.is_closed = True


def task_of(family: str) -> SuiteTask:
    return next(item for item in SUITE.train if item.family == family)


class Fleet:
    """Hands out the fakes in the order given, then any number of good ones."""

    def __init__(self, *first: FakeDesktop):
        self.desktops: list[FakeDesktop] = []
        self._first = list(first)

    def __call__(self) -> FakeDesktop:
        self.desktops.append(self._first.pop(0) if self._first else FakeDesktop())
        return self.desktops[-1]


async def record_with(fleet: Callable[[], FakeDesktop], tasks: tuple[SuiteTask, ...], **options: Any) -> Recording:
    return await record(tasks, make_desktop=fleet, agent=AGENT, pause_s=0.1, num_concurrent=2, **options)


async def test_an_episode_is_recorded_as_a_model_will_see_it():
    item = task_of("rename_folder")
    old, new = item.arguments
    desktop = FakeDesktop()
    played = await play_episode(item.task, item.oracle, desktop=desktop, agent=AGENT, pause_s=0.1)
    assert desktop.commands == [f'pyautogui.write("mv {old} {new}\\n")', "DONE"]
    assert desktop.is_closed
    assert played.reward == 1.0
    assert played.num_steps == 2
    assert [message["role"] for message in played.messages] == ["system", "user", "assistant", "user", "assistant"]
    first, later = played.messages[1]["content"], played.messages[3]["content"]
    assert first[0] == later[0] == {"type": "image"}
    assert first[1]["text"] == f"[Domain hint]\nos\n[Task]\nRename the folder {old} to {new}."
    assert later[1]["text"] == "[Last Action Result]\nok"
    assert played.messages[2]["content"][0]["text"] == (
        f'Action: Rename {old} to {new}\n<tool_call>{{"name":"computer_use","arguments":'
        f'{{"action":"type","text":"mv {old} {new}\\n"}}}}</tool_call>'
    )


async def test_points_are_written_for_the_models_image_and_clicked_on_the_screen():
    item = task_of("click_button")
    x, y = item.oracle[0].arguments["coordinate"]
    desktop = FakeDesktop()
    played = await play_episode(item.task, item.oracle, desktop=desktop, agent=AGENT, pause_s=0.1)
    # 1024x640 becomes 512x320: points are halved for the model and doubled for the screen.
    assert [Image.open(io.BytesIO(image)).size for image in played.images] == [(512, 320), (512, 320)]
    assert f'"coordinate":[{round(x / 2)},{round(y / 2)}]' in played.messages[2]["content"][0]["text"]
    assert desktop.commands[0] == f"pyautogui.click({round(x / 2) * 2}, {round(y / 2) * 2})"


async def test_every_task_gets_its_demonstration_in_order():
    seen: list[RecordProgress] = []
    fleet = Fleet()
    recording = await record_with(fleet, SUITE.train, on_progress=seen.append)
    assert [item.task_id for item in recording.demonstrations] == [item.task.task_id for item in SUITE.train]
    assert recording.failed == ()
    assert recording.num_attempts == len(SUITE.train) == len(fleet.desktops)
    assert [progress.num_done for progress in seen] == list(range(1, len(SUITE.train) + 1))
    assert seen[-1].num_recorded == len(SUITE.train)
    assert all(desktop.is_closed for desktop in fleet.desktops)


@pytest.mark.parametrize(
    "bad",
    [
        FakeDesktop(reward=0.0),
        FakeDesktop(reset_error=ReplicaError("the desktop died")),
        FakeDesktop(score_error=EvaluatorError("the grader crashed")),
    ],
    ids=["unsolved", "dead", "grader"],
)
async def test_a_task_that_fails_once_is_tried_again_on_another_desktop_with_longer_pauses(bad: FakeDesktop):
    fleet = Fleet(bad)
    recording = await record_with(fleet, SUITE.train[:1])
    assert len(recording.demonstrations) == 1
    assert recording.num_attempts == 2
    assert bad.is_closed
    assert fleet.desktops[1].pauses_s == [0.2, 0.2]


async def test_a_task_that_never_works_is_left_out_and_named():
    fleet = Fleet(*[FakeDesktop(reward=0.0) for _ in range(3)])
    recording = await record(SUITE.train, make_desktop=fleet, agent=AGENT, pause_s=0.1, num_concurrent=1)
    assert len(recording.demonstrations) == len(SUITE.train) - 1
    assert [(entry.task_id, entry.error) for entry in recording.failed] == [
        (SUITE.train[0].task.task_id, "the oracle ended with reward 0 instead of 1")
    ]


async def test_many_failing_tasks_are_an_error_that_quotes_the_first():
    with pytest.raises(DatasetError, match=r"20 of 20 tasks .*rename_folder-0000: the desktop died"):
        await record_with(lambda: FakeDesktop(reset_error=ReplicaError("the desktop died")), SUITE.train)


async def test_an_env_server_that_is_gone_ends_the_recording_at_once():
    fleet = Fleet(FakeDesktop(reset_error=EnvServerError("no env server at http://127.0.0.1:1")))
    with pytest.raises(EnvServerError, match="no env server at"):
        await record_with(fleet, SUITE.train)
    assert len(fleet.desktops) <= 4
    assert fleet.desktops[0].is_closed
