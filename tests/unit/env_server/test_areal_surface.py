"""The endpoints of AReaL's bridge over desktops in memory: its answers, its failures, and what its server got wrong."""

import asyncio
import base64
from typing import Any

import httpx
import pytest
from fake_desktops import PNG, until
from surface_server import COMMAND, CRASHING, TASK, Surfaces, surfaces, write_yes

from env_server.api import areal

CREATE: dict[str, Any] = {
    "provider_name": "docker", "path_to_vm": None, "action_space": "pyautogui", "cache_dir": "cache",
    "screen_size": [1920, 1080], "headless": True, "os_type": "Ubuntu", "require_a11y_tree": False,
}  # fmt: skip
"""Word for word what its client sends."""
SLOW = {**TASK, "config": [{"type": "sleep", "parameters": {"seconds": 0.2}}]}


class Session:
    def __init__(self, http: httpx.AsyncClient, session_id: str) -> None:
        self.http, self.session_id = http, session_id

    async def post(self, what: str, **body: Any) -> httpx.Response:
        return await self.http.post(f"/envs/{self.session_id}/{what}", json=body)

    async def reset(self, task: dict[str, Any] = TASK) -> dict[str, Any]:
        answer = await self.post("reset", task_config=task)
        assert answer.status_code == 200, answer.text
        return answer.json()["obs"]

    async def step(self, action: str, **fields: Any) -> httpx.Response:
        return await self.post("step", action=action, pause=0, **fields)

    async def obs(self) -> httpx.Response:
        return await self.http.get(f"/envs/{self.session_id}/obs")


async def session_of(served: Surfaces, **changes: Any) -> Session:
    http = await served.client()
    answer = await http.post("/envs", json={**CREATE, **changes})
    assert answer.status_code == 200, answer.text
    return Session(http, answer.json()["session_id"])


def failure(answer: httpx.Response) -> tuple[int, str]:
    assert isinstance(answer.json()["error"], str)
    return answer.status_code, answer.json()["fault"]


async def test_episode_runs_with_the_calls_of_areals_client() -> None:
    async with surfaces(has_main_port=True) as served:
        session = await session_of(served, require_a11y_tree=True)
        obs = await session.reset()
        assert set(obs) == {"screenshot_b64", "accessibility_tree", "terminal", "instruction"}
        assert base64.b64decode(obs["screenshot_b64"]).startswith(PNG)
        assert (obs["accessibility_tree"], obs["instruction"]) == ("<desktop-frame/>", "Write yes.")
        served.desktop.on_act = write_yes
        reported = (await session.step("import pyautogui\nimport time\npyautogui.write('yes')\ntime.sleep(0)")).json()
        assert set(reported) == {"obs", "reward", "done", "info"}
        assert (reported["reward"], reported["done"], reported["info"]) == (0.0, False, {})
        reported = (await session.step("DONE")).json()
        assert (reported["done"], reported["info"]) == (True, {"done": True})
        assert (await session.post("evaluate")).json() == {"reward": 1.0}
        assert (await session.post("close")).json() == {"ok": True}


async def test_health_has_the_counts_of_areals_server() -> None:
    async with surfaces(3, has_main_port=True) as served:
        session = await session_of(served)
        await session.reset()
        reported = (await session.http.get("/health")).json()
        assert (reported["status"], reported["active_sessions"], reported["max_envs"]) == ("ok", 1, 3)


# What AReaL's own server gets wrong


async def test_session_takes_no_desktop_before_its_reset() -> None:
    async with surfaces(has_main_port=True) as served:
        waiting = [await session_of(served) for _ in range(5)]
        assert served.pool.num_free == 1
        await waiting[3].reset()
        assert (await waiting[4].post("close")).json() == {"ok": True}
        assert await session_of(served), "a full server still opens sessions"


async def test_observation_after_reset_is_a_fresh_one() -> None:
    async with surfaces(has_main_port=True) as served:
        session = await session_of(served)
        await session.reset()
        served.desktop.screen = 55
        assert base64.b64decode((await session.obs()).json()["obs"]["screenshot_b64"]) == PNG + b"55"


async def test_second_reset_gives_the_first_desktop_back() -> None:
    async with surfaces(has_main_port=True) as served:
        session = await session_of(served)
        await session.reset()
        await session.step("pyautogui.click(1, 2)")
        await session.reset()
        assert len(served.episodes) == 1
        assert (await session.step("WAIT", step=1)).status_code == 200, "a new episode, whose first step this is"


async def test_unused_session_is_removed_but_not_while_it_has_a_desktop() -> None:
    async with surfaces(idle_ttl_s=0.05, has_main_port=True) as served:
        unused, used = await session_of(served), await session_of(served)
        await used.reset()
        next(iter(served.episodes)).idle_ttl_s = 1000
        await asyncio.sleep(0.06)
        await session_of(served)
        assert failure(await unused.post("reset", task_config=TASK)) == (404, "client_error")
        assert (await used.step("WAIT")).status_code == 200


async def test_session_whose_desktop_was_reaped_says_why_and_can_be_reset() -> None:
    async with surfaces(idle_ttl_s=0.05, has_main_port=True) as served:
        session = await session_of(served)
        await session.reset()
        await asyncio.sleep(0.06)
        await served.episodes.reap_idle()
        await until(lambda: served.pool.num_free == 1)
        late = await session.step("WAIT")
        assert failure(late) == (404, "client_error")
        assert "it was not used for 0.05 s" in late.json()["error"]
        assert await session.reset()


async def test_lost_desktop_is_a_fault_and_never_a_reward() -> None:
    async with surfaces(has_main_port=True) as served:
        session = await session_of(served)
        await session.reset()
        served.desktop.alive = False
        for answer in (await session.step("DONE"), await session.obs(), await session.post("evaluate")):
            assert failure(answer) == (500, "env_fault")
            assert "reward" not in answer.json()
        await until(lambda: served.pool.num_free == 1)
        assert await session.reset()


async def test_screenshot_that_is_not_an_image_is_a_fault_and_not_an_empty_screenshot() -> None:
    async with surfaces(has_main_port=True) as served:
        session = await session_of(served)
        await session.reset()
        served.desktop.commands.clear()

        async def no_image(*_: Any, **__: Any) -> bytes:
            return b"not an image"

        served.desktop.guest.screenshot = no_image
        assert failure(await session.step("WAIT")) == (500, "env_fault")


async def test_grader_that_crashes_is_a_fault_and_not_a_zero() -> None:
    async with surfaces(has_main_port=True) as served:
        session = await session_of(served)
        await session.reset(CRASHING)
        answer = await session.post("evaluate")
        assert failure(answer) == (500, "grader_fault")
        assert "reward" not in answer.json()


async def test_evaluation_is_graded_once_for_the_same_last_step() -> None:
    async with surfaces(has_main_port=True) as served:
        session = await session_of(served)
        await session.reset()
        write_yes(served.desktop)
        rewards = [(await session.post("evaluate")).json()["reward"] for _ in range(3)]
        assert rewards == [1.0] * 3
        assert served.desktop.executed.count(COMMAND) == 1


async def test_close_is_idempotent_and_gives_the_desktop_back() -> None:
    async with surfaces(has_main_port=True) as served:
        session = await session_of(served)
        await session.reset()
        for _ in range(2):
            assert (await session.post("close")).json() == {"ok": True}
        await until(lambda: served.pool.num_free == 1)
        assert failure(await session.step("WAIT")) == (404, "client_error")


async def test_session_closed_during_its_reset_holds_no_desktop() -> None:
    async with surfaces(has_main_port=True) as served:
        session = await session_of(served)
        resetting = asyncio.create_task(session.post("reset", task_config=SLOW))
        await until(lambda: served.pool.num_free == 0)
        assert (await session.post("close")).status_code == 200
        assert failure(await resetting) == (404, "client_error")
        await until(lambda: served.pool.num_free == 1)


async def test_two_resets_of_one_session_leave_one_desktop() -> None:
    async with surfaces(2, has_main_port=True) as served:
        session = await session_of(served)
        answers = await asyncio.gather(*(session.post("reset", task_config=SLOW) for _ in range(2)))
        assert [answer.status_code for answer in answers] == [200, 200]
        assert len(served.episodes) == 1


async def test_full_server_answers_503_after_a_bounded_wait() -> None:
    async with surfaces(has_main_port=True) as served:
        await (await session_of(served)).reset()
        answer = await (await session_of(served)).post("reset", task_config=TASK)
        assert failure(answer) == (503, "no_capacity")
        assert int(answer.headers["retry-after"]) > 0


async def test_step_sent_again_with_its_number_acts_once() -> None:
    async with surfaces(has_main_port=True) as served:
        session = await session_of(served)
        await session.reset()
        for _ in range(2):
            assert (await session.step("pyautogui.click(1, 2)", step=1)).status_code == 200
        assert len(served.desktop.acts) == 1


async def test_set_up_command_runs_to_its_end_and_an_unknown_verb_is_refused() -> None:
    async with surfaces(has_main_port=True) as served:
        session = await session_of(served)
        await session.reset({**TASK, "config": [{"type": "command", "parameters": {"command": ["make", "it"]}}]})
        assert (served.desktop.executed, served.desktop.launched) == ([["make", "it"]], [])
        answer = await session.post("reset", task_config={**TASK, "config": [{"type": "dance", "parameters": {}}]})
        assert failure(answer) == (422, "client_error")


async def test_token_is_required_if_the_server_has_one() -> None:
    async with surfaces(environment={"ENV_SERVER_TOKEN": "secret"}, has_main_port=True) as served:
        http = await served.client()
        assert (await http.post("/envs", json=CREATE)).status_code == 401
        http.headers["Authorization"] = "Bearer secret"
        assert (await http.post("/envs", json=CREATE)).status_code == 200


async def test_sessions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(areal, "MAX_SESSIONS", 2)
    async with surfaces(has_main_port=True) as served:
        await session_of(served), await session_of(served)
        assert failure(await (await served.client()).post("/envs", json=CREATE)) == (503, "no_capacity")


# Requests that are refused


async def test_snippet_that_is_more_than_literal_calls_is_400_and_nothing_runs() -> None:
    snippets = (
        "import os; os.system('x')", "while True:\n    pass", "x = 1", "pyautogui.click(*[1, 2])", "eval('1')",
        "pyautogui.screenshot()", "print('x')", "done", "", "pyautogui.press('enter\\n')",
    )  # fmt: skip
    async with surfaces(has_main_port=True) as served:
        session = await session_of(served)
        await session.reset()
        for snippet in snippets:
            assert failure(await session.step(snippet)) == (400, "client_error"), snippet
        assert (served.desktop.acts, served.desktop.executed) == ([], [])


async def test_step_without_an_action_is_400_and_before_the_reset_409() -> None:
    async with surfaces(has_main_port=True) as served:
        session = await session_of(served)
        assert failure(await session.post("step")) == (400, "client_error")
        assert failure(await session.step("WAIT")) == (409, "client_error")
        assert failure(await session.obs()) == (409, "client_error")
        assert failure(await session.post("reset")) == (422, "client_error")


async def test_session_for_other_desktops_is_refused_at_once() -> None:
    refused: list[tuple[dict[str, Any], int]] = [
        ({"screen_size": [800, 600]}, 409),
        ({"screen_size": [1, 2, 3]}, 422),
        ({"os_type": "Windows"}, 422),
        ({"action_space": "computer_13"}, 422),
    ]
    async with surfaces(has_main_port=True) as served:
        http = await served.client()
        for changes, status in refused:
            assert failure(await http.post("/envs", json={**CREATE, **changes})) == (status, "client_error"), changes


async def test_unknown_session_is_404() -> None:
    async with surfaces(has_main_port=True) as served:
        session = Session(await served.client(), "none")
        for what in ("reset", "step", "evaluate"):
            assert failure(await session.post(what, task_config=TASK, action="WAIT")) == (404, "client_error")
        assert failure(await session.obs()) == (404, "client_error")
        assert (await session.post("close")).json() == {"ok": True}
