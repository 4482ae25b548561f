"""An episode on a leased desktop in memory: set-up, waiting for windows, limits, and the answers that it keeps."""

import asyncio
import io
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fake_desktops import FakeDesktop, until
from PIL import Image

from env_server.driving.download import Downloader
from env_server.driving.driver import View, check_env_config
from env_server.driving.guest_driver import GuestDrivers
from env_server.driving.settle import screen_digest, wait_until_calm
from env_server.episodes.episode import Episode, OnTiming
from env_server.episodes.outcomes import StepOrderError
from env_server.replicas.replica import Lease
from env_server.settings import TaskLimits
from osworld_pipeline.errors import ActionParseError, EvaluatorError, ReplicaError, SetupError, TaskError
from osworld_pipeline.wire import EnvConfig

_OPEN: list[GuestDrivers] = []


@pytest.fixture(autouse=True)
async def drivers_are_closed() -> AsyncIterator[None]:
    """Closes the drivers, with the processes in which they grade."""
    yield
    while _OPEN:
        await _OPEN.pop().close()


def an_episode(
    desktop: FakeDesktop,
    *,
    limits: TaskLimits | None = None,
    env_config: EnvConfig | None = None,
    on_timing: OnTiming = lambda part, seconds: None,
    **changes: Any,
) -> Episode:
    config = {"id": "t", "instruction": "Do it.", "evaluator": {"func": "infeasible"}, **changes}
    limits = limits or TaskLimits()
    drivers = GuestDrivers(limits=limits, downloader=Downloader(limits), screen=(800, 600))
    _OPEN.append(drivers)
    return Episode(
        episode_id="e",
        plan=drivers.plan(config),
        lease=Lease(replica_id="d", desktop=desktop),
        view=View.of(env_config or EnvConfig(require_terminal=True)),
        on_timing=on_timing,
    )


def one_pixel_png() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (1, 1)).save(buffer, "PNG")
    return buffer.getvalue()


async def test_prepare_observes_after_the_set_up() -> None:
    desktop = FakeDesktop("d")
    episode = an_episode(desktop, config=[{"type": "launch", "parameters": {"command": ["editor"]}}])
    observation = await episode.prepare()
    assert observation.screenshot.endswith(b"1"), "the screen as it is with the editor"
    assert observation.instruction == "Do it."
    assert (observation.accessibility_tree, observation.terminal) == ("<desktop-frame/>", "$ ")


async def test_trees_and_terminals_are_read_only_if_requested() -> None:
    episode = an_episode(FakeDesktop("d"), env_config=EnvConfig(require_a11y_tree=False))
    observation = await episode.prepare()
    assert (observation.accessibility_tree, observation.terminal) == (None, None)


async def test_calls_are_sent_in_one_piece_and_the_last_action_decides() -> None:
    desktop = FakeDesktop("d")
    episode = an_episode(desktop)
    await episode.prepare()
    result = await episode.step("pyautogui.click(1, 2); pyautogui.write('a')", pause_s=0.0)
    assert desktop.acts == [
        [
            {"name": "click", "args": [1, 2], "kwargs": {}},
            {"name": "write", "args": ["a"], "kwargs": {}},
        ]
    ]
    assert (result.num_steps, result.is_done) == (1, False)
    assert (await episode.step("FAIL", pause_s=0.0)).is_done
    assert await episode.evaluate() == 1.0
    await episode.step("WAIT", pause_s=0.0)
    assert await episode.evaluate() == 0.0


async def test_refused_action_leaves_the_last_action_unchanged() -> None:
    episode = an_episode(FakeDesktop("d"))
    await episode.prepare()
    await episode.step("FAIL", pause_s=0.0)
    with pytest.raises(ActionParseError):
        await episode.step("nonsense", pause_s=0.0)
    assert (episode.last_action, episode.num_steps) == ("FAIL", 1)


async def test_step_sent_again_is_answered_as_before_and_not_done_again() -> None:
    desktop = FakeDesktop("d")
    episode = an_episode(desktop)
    await episode.prepare()
    first = await episode.step("pyautogui.press('a')", pause_s=0.0, number=1)
    again = await episode.step(" pyautogui.press('a') ", pause_s=0.0, number=1)
    assert (again.observation, again.num_steps, again.is_repeated) == (first.observation, 1, True)
    assert len(desktop.acts) == 1
    assert (await episode.step("pyautogui.press('a')", pause_s=0.0, number=2)).is_repeated is False
    assert len(desktop.acts) == 2


async def test_step_sent_again_while_it_is_running_is_executed_once() -> None:
    desktop = FakeDesktop("d")
    episode = an_episode(desktop)
    await episode.prepare()
    desktop.act_gate = asyncio.Event()
    sent = [asyncio.create_task(episode.step("pyautogui.press('a')", pause_s=0.0, number=1)) for _ in range(3)]
    await asyncio.sleep(0.02)
    desktop.act_gate.set()
    results = await asyncio.gather(*sent)
    assert [result.is_repeated for result in results] == [False, True, True]
    assert len(desktop.acts) == 1


@pytest.mark.parametrize(("action", "number"), [("DONE", 1), ("WAIT", 3), ("WAIT", 17)])
async def test_step_number_out_of_order_or_of_another_action_is_refused(action: str, number: int) -> None:
    episode = an_episode(FakeDesktop("d"))
    await episode.prepare()
    await episode.step("WAIT", pause_s=0.0, number=1)
    with pytest.raises(StepOrderError, match="the next is 2"):
        await episode.step(action, pause_s=0.0, number=number)
    assert episode.num_steps == 1


async def test_step_whose_desktop_died_before_its_answer_gets_the_same_error_when_it_is_sent_again() -> None:
    desktop = FakeDesktop("d")
    episode = an_episode(desktop)
    await episode.prepare()
    desktop.on_act = lambda dying: setattr(dying, "alive", False)
    for _ in range(2):
        with pytest.raises(ReplicaError, match="cannot be reached"):
            await episode.step("pyautogui.press('a')", pause_s=0.0, number=1)
    assert len(desktop.acts) == 1


async def test_kept_answer_is_returned_again_even_when_the_desktop_is_gone() -> None:
    desktop = FakeDesktop("d")
    episode = an_episode(desktop)
    await episode.prepare()
    first = await episode.step("WAIT", pause_s=0.0, number=1)
    desktop.alive = False
    episode._lease.fail("it died")
    assert (await episode.step("WAIT", pause_s=0.0, number=1)).observation == first.observation


async def test_evaluation_is_made_once_for_the_same_last_step() -> None:
    desktop = FakeDesktop("d")
    command = {"type": "vm_command_line", "command": "look"}
    expected = {"type": "rule", "rules": {"expected": ""}}
    episode = an_episode(desktop, evaluator={"func": "exact_match", "result": command, "expected": expected})
    await episode.prepare()
    assert [await episode.evaluate() for _ in range(2)] == [1.0, 1.0]
    assert len(desktop.executed) == 1
    await episode.step("WAIT", pause_s=0.0)
    assert episode.reward is None, "a further step makes the reward old"
    await episode.evaluate()
    assert len(desktop.executed) == 2


async def test_fresh_screenshot_leaves_the_last_observation_unchanged() -> None:
    desktop = FakeDesktop("d")
    episode = an_episode(desktop)
    first = await episode.prepare()
    desktop.screen = 7
    assert (await episode.screenshot("png", None)).screenshot.endswith(b"7")
    assert episode.observation is first


async def test_parts_of_a_call_are_timed() -> None:
    received: list[str] = []
    episode = an_episode(FakeDesktop("d"), on_timing=lambda part, seconds: received.append(part))
    await episode.prepare()
    await episode.step("WAIT", pause_s=0.0)
    await episode.evaluate()
    assert received == ["reset", "observe", "act", "observe", "evaluate"]


async def test_wait_takes_its_pause_twice_as_in_osworld() -> None:
    episode = an_episode(FakeDesktop("d"))
    await episode.prepare()
    start = time.monotonic()
    await episode.step("WAIT", pause_s=0.1)
    assert time.monotonic() - start >= 0.2


async def test_adaptive_pause_is_waited_for_by_the_guest_itself() -> None:
    desktop = FakeDesktop("d")
    episode = an_episode(desktop)
    await episode.prepare()
    start = time.monotonic()
    await episode.step("pyautogui.press('a')", pause_s=5.0, settle="adaptive")
    await episode.step("DONE", pause_s=5.0, settle="adaptive")
    await episode.step("pyautogui.press('a')", pause_s=0.0)
    assert desktop.settles_s == [5.0, 5.0, None]
    assert time.monotonic() - start < 4.0, "the fake guest is calm at once"


async def test_wait_takes_its_pause_once_if_the_pause_is_adaptive() -> None:
    episode = an_episode(FakeDesktop("d"))
    await episode.prepare()
    start = time.monotonic()
    await episode.step("WAIT", pause_s=2.0, settle="adaptive")
    assert 2.0 <= time.monotonic() - start < 4.0, "twice is with a fixed pause"


async def test_screen_of_a_guest_that_cannot_wait_itself_is_polled_until_it_has_settled() -> None:
    desktop = FakeDesktop("d")
    desktop.can_settle = False
    desktop.pictures["png"] = one_pixel_png()
    episode = an_episode(desktop)
    await episode.prepare()
    start = time.monotonic()
    await episode.step("pyautogui.press('a')", pause_s=6.0, settle="adaptive")
    assert len(desktop.acts) == 1
    assert 3.0 <= time.monotonic() - start < 5.8, "half of the pause without any change is enough"


async def test_dead_desktop_ends_the_lease_at_once_and_later_calls_get_the_same_error() -> None:
    desktop = FakeDesktop("d")
    episode = an_episode(desktop)
    await episode.prepare()
    desktop.alive = False
    with pytest.raises(ReplicaError):
        await episode.step("WAIT", pause_s=0.0)
    assert episode._lease.is_over
    desktop.alive = True
    with pytest.raises(ReplicaError, match="cannot be reached"):
        await episode.evaluate()


async def test_set_up_that_takes_too_long_is_a_set_up_error() -> None:
    limits = TaskLimits(setup_timeout_s=0.05)
    episode = an_episode(FakeDesktop("d"), limits=limits, config=[{"type": "sleep", "parameters": {"seconds": 5}}])
    with pytest.raises(SetupError, match=r"more than 0\.05 s"):
        await episode.prepare()


async def test_grading_that_takes_too_long_or_cannot_start_is_an_evaluator_error() -> None:
    desktop = FakeDesktop("d")
    slow = {"func": "infeasible", "postconfig": [{"type": "sleep", "parameters": {"seconds": 5}}]}
    episode = an_episode(desktop, limits=TaskLimits(evaluate_timeout_s=0.05), evaluator=slow)
    await episode.prepare()
    with pytest.raises(EvaluatorError, match=r"more than 0\.05 s"):
        await episode.evaluate()
    desktop.commands["a"] = (500, {"status": "error", "message": "gone"})
    broken = {"func": "infeasible", "postconfig": [{"type": "execute", "parameters": {"command": "a"}}]}
    episode = an_episode(desktop, evaluator=broken)
    await episode.prepare()
    with pytest.raises(EvaluatorError, match="could not start"):
        await episode.evaluate()


async def test_calm_screen_is_recognised_after_two_looks() -> None:
    start = time.monotonic()
    await wait_until_calm(FakeDesktop("d").guest)
    assert 0.1 <= time.monotonic() - start < 2.5


async def test_window_that_is_still_to_come_is_waited_for() -> None:
    desktop = FakeDesktop("d")
    before = await screen_digest(desktop.guest)
    waiting = asyncio.create_task(wait_until_calm(desktop.guest, before=before))
    await asyncio.sleep(0.5)
    assert not waiting.done(), "the screen is calm, but nothing has appeared yet"
    desktop.screen += 1
    await until(waiting.done)


async def test_wait_for_a_screen_that_never_stops_changing_is_bounded() -> None:
    desktop = FakeDesktop("d")
    waiting = asyncio.create_task(wait_until_calm(desktop.guest))
    start = time.monotonic()
    while not waiting.done():
        desktop.screen += 1
        await asyncio.sleep(0.02)
    assert 2.5 < time.monotonic() - start < 10


@pytest.mark.parametrize("config", [EnvConfig(os_type="Windows"), EnvConfig(action_space="computer_13")])
def test_system_or_action_space_that_this_server_does_not_have_is_refused(config: EnvConfig) -> None:
    with pytest.raises(TaskError, match="this env server"):
        check_env_config(config)


async def test_a_desktop_that_dies_during_grading_is_an_env_fault_and_not_a_reward() -> None:
    class Dying(FakeDesktop):
        async def _answer_json(self, path: str, body: dict[str, Any]) -> httpx.Response:
            if path == "/execute":
                self.alive = False  # after this very answer, which looks like that of an idle desktop
            return await super()._answer_json(path, body)

    evaluator = {
        "func": "exact_match",
        "result": {"type": "vm_command_line", "command": "cat answer"},
        "expected": {"type": "rule", "rules": {"expected": "right"}},
    }
    episode = an_episode(Dying("d"), evaluator=evaluator)
    await episode.prepare()
    with pytest.raises(ReplicaError):
        await episode.evaluate()
    assert episode.reward is None
    assert episode.outcome("closed") == "env_fault"


async def test_a_killed_command_of_the_set_up_fails_the_set_up() -> None:
    desktop = FakeDesktop("d")
    desktop.commands["make"] = (200, {"status": "success", "output": "", "error": "", "returncode": 137})
    episode = an_episode(desktop, config=[{"type": "execute", "parameters": {"command": "make"}}])
    with pytest.raises(SetupError, match="was killed"):
        await episode.prepare()
