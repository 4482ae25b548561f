"""A person's input: only if the server allows it, only valid actions, and always marked."""

import asyncio
from typing import Any

import httpx
import pytest
from fake_desktops import until
from served_app import Server, fault, serving
from surface_server import TASK, write_yes

from env_server.episodes.person import MAX_WAITING, InputQueue, PersonInputError
from osworld_pipeline.domain.task import Task
from osworld_pipeline.errors import TouchedError
from osworld_pipeline.rollout.env_client import EnvClient

CLICK = "pyautogui.click(20, 30)"


async def send(server: Server, episode_id: str, action: str = CLICK) -> Any:
    return await server.post(f"/v1/episodes/{episode_id}/person/inputs", action=action)


async def take(server: Server, episode_id: str, *, after: int = 0, wait: float = 0) -> dict[str, Any]:
    answer = await server.post(f"/v1/episodes/{episode_id}/person/next", after=after, wait=wait)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_without_allow_takeover_no_input_is_accepted() -> None:
    async with serving() as server:
        episode_id = await server.reset()
        for path, body in (("inputs", {"action": CLICK}), ("next", {"after": 0})):
            answer = await server.post(f"/v1/episodes/{episode_id}/person/{path}", **body)
            assert fault(answer) == (409, "client_error")
            assert "--allow-takeover" in answer.json()["error"]
        assert server.provider.desktops[0].acts == []
        assert (await server.post("/evaluate", episode_id=episode_id)).status_code == 200


async def test_an_input_needs_the_token_if_the_server_has_one() -> None:
    async with serving(environment={"ENV_SERVER_TOKEN": "secret"}, allow_takeover=True) as server:
        assert (await send(server, "any")).status_code == 401


async def test_an_input_is_executed_between_steps_and_touches_the_episode_for_every_client() -> None:
    async with serving(allow_takeover=True) as server:
        episode_id = await server.reset()
        desktop = server.provider.desktops[0]
        before = (await server.post("/step", episode_id=episode_id, action="WAIT", pause=0, step=1)).json()
        assert before["num_person_inputs"] == 0
        assert (await send(server, episode_id)).json() == {"is_queued": False, "num_person_inputs": 1}
        assert [call["name"] for call in desktop.acts[-1]] == ["click"]
        after = (await server.post("/step", episode_id=episode_id, action="WAIT", pause=0, step=2)).json()
        assert (after["step"], after["num_person_inputs"]) == (2, 1), "the client's steps keep their numbers"
        info = (await server.http.get(f"/v1/episodes/{episode_id}")).json()
        assert (info["num_person_inputs"], info["is_demonstration"]) == (1, False)
        write_yes(desktop)
        for path in ("/evaluate", "/evaluate"):
            answer = await server.post(path, episode_id=episode_id)
            assert fault(answer) == (500, "touched")
            assert answer.json()["num_person_inputs"] == 1
        graded = (await server.post(f"/v1/episodes/{episode_id}/evaluation")).json()
        assert (graded["reward"], graded["num_person_inputs"]) == (1.0, 1)
        await server.post("/close", episode_id=episode_id)
        assert 'env_server_episodes_ended_total{outcome="touched"} 1.0' in (await server.http.get("/metrics")).text


@pytest.mark.parametrize(
    "action",
    ["import os", "os.system('id')", "pyautogui.click(open('/etc/passwd'))", "pyautogui.screenshot()", "", "WAIT",
     "DONE", "FAIL", "time.sleep(3600)", "pyautogui.press('a', presses=1e8, interval=1)"],
)  # fmt: skip
async def test_an_input_that_is_not_an_action_is_refused_and_marks_nothing(action: str) -> None:
    async with serving(allow_takeover=True) as server:
        episode_id = await server.reset()
        assert fault(await send(server, episode_id, action)) == (400, "client_error")
        assert server.provider.desktops[0].acts == []
        info = (await server.http.get(f"/v1/episodes/{episode_id}")).json()
        assert info["num_person_inputs"] == 0


async def test_a_graded_episode_takes_no_input_and_keeps_its_reward() -> None:
    async with serving(allow_takeover=True) as server:
        episode_id = await server.reset()
        write_yes(server.provider.desktops[0])
        assert (await server.post("/evaluate", episode_id=episode_id)).json()["reward"] == 1.0
        assert fault(await send(server, episode_id)) == (409, "client_error")
        assert (await server.post("/evaluate", episode_id=episode_id)).json()["reward"] == 1.0


async def test_the_number_of_inputs_that_wait_for_their_turn_is_bounded() -> None:
    async with serving(allow_takeover=True) as server:
        episode_id = await server.reset()
        desktop = server.provider.desktops[0]
        desktop.act_gate = asyncio.Event()
        waiting = [asyncio.create_task(send(server, episode_id)) for _ in range(MAX_WAITING)]
        episode = server.app.state.episodes.find(episode_id)
        await until(lambda: episode.is_busy)
        await asyncio.sleep(0.05)
        assert fault(await send(server, episode_id)) == (409, "client_error")
        desktop.act_gate.set()
        answers = await asyncio.gather(*waiting)
        assert {answer.status_code for answer in answers} == {200}
        assert episode.num_person_inputs == len(desktop.acts) == MAX_WAITING


async def test_a_desktop_that_dies_after_a_persons_input_is_not_tampering_by_the_policy() -> None:
    async with serving(allow_takeover=True) as server:
        episode_id = await server.reset()
        await send(server, episode_id)
        desktop = server.provider.desktops[0]
        desktop.alive, desktop.cause = False, "its X server was ended"
        answer = await server.post("/step", episode_id=episode_id, action=CLICK, pause=0, step=1)
        assert fault(answer) == (500, "touched")


async def test_our_own_client_gets_no_reward_for_a_touched_episode_and_gets_its_number_of_inputs() -> None:
    async with serving(allow_takeover=True) as server:
        transport = httpx.ASGITransport(app=server.app)
        async with EnvClient("http://localhost", transport=transport) as client:
            desktop = client.desktop()
            await desktop.reset(Task.from_config(TASK), record_id="eval-c-0")
            await send(server, desktop.episode_id)
            assert (await desktop.act("WAIT", pause_s=0)).num_person_inputs == 1
            await send(server, desktop.episode_id)
            with pytest.raises(TouchedError, match="a person sent 2 inputs to the desktop of this episode") as caught:
                await desktop.score()
            await desktop.close()
        assert caught.value.num_inputs == 2
        (replica,) = (await server.http.get("/status.json")).json()["replicas"]
        assert (replica["last"]["outcome"], replica["last"]["record_id"]) == ("touched", "eval-c-0")


async def test_in_a_demonstration_inputs_are_queued_for_the_client_and_touch_nothing() -> None:
    async with serving(allow_takeover=True) as server:
        episode_id = await server.reset()
        assert await take(server, episode_id) == {"number": 0, "action": ""}
        assert (await send(server, episode_id)).json() == {"is_queued": True, "num_person_inputs": 0}
        await send(server, episode_id, "DONE")
        assert fault(await send(server, episode_id)) == (409, "client_error"), "it has ended"
        first = {"number": 1, "action": CLICK}
        assert await take(server, episode_id) == await take(server, episode_id) == first, "a lost answer loses none"
        assert await take(server, episode_id, after=1) == {"number": 2, "action": "DONE"}
        assert server.provider.desktops[0].acts == []
        await server.post("/step", episode_id=episode_id, action="DONE", pause=0, step=1)
        assert (await server.post("/evaluate", episode_id=episode_id)).status_code == 200


async def test_a_client_that_waits_gets_the_input_at_once_and_a_closed_episode_ends_the_wait() -> None:
    async with serving(allow_takeover=True) as server:
        episode_id = await server.reset(TASK)
        waiting = asyncio.create_task(take(server, episode_id, wait=20))
        episode = server.app.state.episodes.find(episode_id)
        await until(lambda: episode.demonstration is not None)
        await send(server, episode_id)
        assert (await waiting)["action"] == CLICK
        waiting = asyncio.create_task(take(server, episode_id, after=1, wait=20))
        await asyncio.sleep(0.05)
        await server.post("/close", episode_id=episode_id)
        assert await asyncio.wait_for(waiting, 5) == {"number": 0, "action": ""}


def test_a_queue_that_no_program_empties_refuses_further_inputs() -> None:
    queue = InputQueue()
    for _ in range(MAX_WAITING):
        queue.add(CLICK)
    with pytest.raises(PersonInputError, match="start it again"):
        queue.add(CLICK)
