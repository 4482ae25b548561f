"""The desktop as a Gymnasium environment, over a server in memory."""

import json
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from desktop_server import TASKS, DesktopServer
from gymnasium.utils.env_checker import check_env

from osworld_pipeline.errors import EvaluatorError, ReplicaError, TaskError
from osworld_pipeline.integrations.osgym.gym_env import ENV_ID

FINISH = "<|think_start|>done<|think_end|><|action_start|>finish()<|action_end|>"


_OPEN: list[gymnasium.Env[Any, str]] = []


@pytest.fixture(autouse=True)
def environments_are_closed() -> Iterator[None]:
    """Closes the environments, and with them the threads that watch their servers."""
    yield
    while _OPEN:
        _OPEN.pop().close()


def make(server: DesktopServer, **options: Any) -> gymnasium.Env[Any, str]:
    fixed = {"server_url": "http://s", "tasks": TASKS, "screen_size": (64, 64), "pause_s": 0.0}
    _OPEN.append(gymnasium.make(ENV_ID, transport=server.transport, **fixed | options))
    return _OPEN[-1]


def test_environment_passes_gymnasiums_checker() -> None:
    server = DesktopServer()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env = make(server, render_mode="rgb_array")
        # A transport cannot be copied to the second environment that the checker would make to render in other modes.
        check_env(env.unwrapped, skip_render_check=True)
        env.reset(seed=1)
        assert env.render().shape == (64, 64, 3)
    env.close()
    assert server.open == set()


def test_points_are_scaled_and_the_graders_score_is_the_reward() -> None:
    server = DesktopServer()
    env = make(server)
    observation, info = env.reset(seed=1)
    assert observation["screenshot"].max() == 0
    assert observation["instruction"] == next(t["instruction"] for t in TASKS if t["id"] == info["task_id"])
    observation, reward, terminated, truncated, info = env.step("click(500,250)")
    assert (reward, terminated, truncated) == (0.0, False, False)
    assert server.actions == ["pyautogui.click(64, 32)"], "thousandths of the screen of 128x128"
    assert observation["screenshot"].min() == 10
    env.step("type(good)")
    _, reward, terminated, truncated, _ = env.step(FINISH)
    assert (reward, terminated, truncated) == (1.0, True, False)
    assert server.open == set()


def test_an_invalid_or_refused_action_changes_nothing_and_the_info_says_why() -> None:
    server = DesktopServer()
    env = make(server)
    env.reset(seed=1)
    for text, why in (("I would click", "not a call"), ("type(rm -rf)", "refused")):
        observation, _, terminated, _, info = env.step(text)
        assert why in info["action_error"]
        assert observation["screenshot"].max() == 0
        assert not terminated
    assert server.actions == []


def test_last_step_is_carried_out_graded_and_truncated() -> None:
    server = DesktopServer()
    env = make(server, max_steps=1)
    env.reset(seed=1)
    _, reward, terminated, truncated, _ = env.step("type(good)")
    assert (reward, terminated, truncated) == (1.0, False, True)
    with pytest.raises(ValueError, match="call reset first"):
        env.step("wait()")


@pytest.mark.parametrize(
    ("path", "fault", "kind"), [("/step", "env_fault", ReplicaError), ("/evaluate", "grader_fault", EvaluatorError)]
)
def test_fault_is_never_a_reward_of_zero(path: str, fault: str, kind: type[Exception]) -> None:
    server = DesktopServer()
    server.faults[path] = (500, {"error": "it died", "fault": fault})
    action = FINISH if path == "/evaluate" else "click(1,1)"
    env = make(server)
    env.reset(seed=1)
    with pytest.raises(kind, match="it died"):
        env.step(action)
    assert server.open == set()
    # Gymnasium's passive checker warns about a reward that is not a number. This mode returns one on purpose.
    env = make(server, fault_mode="truncate", disable_env_checker=True)
    env.reset(seed=1)
    _, reward, terminated, truncated, info = env.step(action)
    assert math.isnan(reward)
    assert (terminated, truncated, info["fault"], info["fault_kind"]) == (False, True, "it died", kind.__name__)


@pytest.mark.parametrize("path", ["/step", "/evaluate"])
def test_tampering_terminates_with_a_reward_of_zero(path: str) -> None:
    server = DesktopServer()
    server.faults[path] = (500, {"error": "its X server was ended", "fault": "tampering"})
    env = make(server)
    env.reset(seed=1)
    _, reward, terminated, truncated, info = env.step(FINISH)
    assert (reward, terminated, truncated, info["tampering"]) == (0.0, True, False, "its X server was ended")
    assert server.open == set()


def test_seed_and_option_choose_the_task(tmp_path: Path) -> None:
    for task in TASKS:
        (tmp_path / f"{task['id']}.json").write_text(json.dumps(task))
    env = make(DesktopServer(), tasks=str(tmp_path))
    first = [env.reset(seed=seed)[1]["task_id"] for seed in range(12)]
    assert first == [env.reset(seed=seed)[1]["task_id"] for seed in range(12)]
    assert set(first) == {"t0", "t1", "t2"}
    assert env.reset(options={"task_id": "t2"})[1]["task_id"] == "t2"
    with pytest.raises(TaskError, match="no task 't9'"):
        env.reset(options={"task_id": "t9"})


def test_several_desktops_step_as_one_vector() -> None:
    servers = [DesktopServer(), DesktopServer()]
    envs = gymnasium.vector.SyncVectorEnv([lambda server=server: make(server, max_steps=2) for server in servers])
    observations, _ = envs.reset(seed=[1, 2])
    assert observations["screenshot"].shape == (2, 64, 64, 3)
    envs.step(("type(good)", "wait()"))
    _, rewards, terminated, truncated, _ = envs.step((FINISH, "wait()"))
    assert (rewards.tolist(), terminated.tolist(), truncated.tolist()) == ([1.0, 0.0], [True, False], [False, True])
    observations, *_ = envs.step(("wait()", "wait()"))
    assert np.array_equal(observations["screenshot"][0], np.zeros((64, 64, 3)))
    envs.close()


def test_invalid_options_of_an_environment_are_refused() -> None:
    with pytest.raises(TaskError, match="at least one task"):
        make(DesktopServer(), tasks=[])
    with pytest.raises(ValueError, match="no dialect"):
        make(DesktopServer(), dialect="klingon")
    env = make(DesktopServer(), screen_size=(32, 32))
    with pytest.raises(Exception, match="screenshots of 64x64, not 32x32"):
        env.reset()
