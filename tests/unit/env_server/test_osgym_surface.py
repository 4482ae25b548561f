"""OSGym's endpoints over desktops in memory: its answers, its failures, and what its own server got wrong."""

import asyncio
import base64
import time
from typing import Any

import httpx
import pytest
from chaos import free_port
from fake_desktops import PNG, until
from surface_server import CRASHING, INFEASIBLE, TASK, surfaces, write_yes

from env_server.osgym_ports import osgym_listeners
from env_server.server_settings import ServerSettings
from env_server.settings import SettingsError
from osworld_pipeline.errors import NoCapacityError

CLICK = "click(100,100)"


async def reset(http: httpx.AsyncClient, task: dict[str, Any] = TASK, idle_s: float = 1000) -> int:
    answer = await http.post("/reset", json={"task_config": task, "timeout": idle_s})
    assert answer.status_code == 200, answer.text
    return answer.json()["vm_id"]


async def step(http: httpx.AsyncClient, vm_id: int, action: str = CLICK, **fields: Any) -> httpx.Response:
    return await http.post("/step", json={"action": action, "vm_id": vm_id, **fields})


def failure(answer: httpx.Response) -> tuple[int, str]:
    reported = answer.json()
    assert set(reported) == {"message", "fault"}
    assert isinstance(reported["message"], str)
    return answer.status_code, reported["fault"]


async def test_episode_runs_with_the_calls_of_osgyms_client() -> None:
    async with surfaces() as served:
        http = await served.client(served.osgym())
        answer = await http.post("/reset", json={"task_config": {**TASK, "snapshot": "os"}, "timeout": 1000})
        reported = answer.json()
        assert set(reported) == {"screenshot", "problem", "vm_id"}
        assert base64.b64decode(reported["screenshot"]).startswith(PNG)
        assert reported["problem"] == "Write yes."
        assert type(reported["vm_id"]) is int
        served.desktop.on_act = write_yes
        vm_id = reported["vm_id"]
        reported = (await step(http, vm_id)).json()
        assert set(reported) == {"screenshot", "is_finish", "reward"}
        assert (reported["is_finish"], reported["reward"]) == (False, 0.0)
        reported = (await http.get("/screenshot", params={"vmId": vm_id})).json()
        assert set(reported) == {"screenshot", "vm_id"}


async def test_finished_episode_is_graded_and_its_desktop_given_back() -> None:
    async with surfaces() as served:
        http = await served.client(served.osgym())
        vm_id = await reset(http)
        write_yes(served.desktop)
        reported = (await step(http, vm_id, "finish()")).json()
        assert (reported["is_finish"], reported["reward"]) == (True, 1.0)
        await until(lambda: served.pool.num_free == 1)
        assert failure(await step(http, vm_id)) == (400, "client_error")
        assert "finished; reset again" in (await step(http, vm_id)).json()["message"]


async def test_finish_after_a_lost_answer_is_answered_the_same_and_graded_once() -> None:
    async with surfaces() as served:
        http = await served.client(served.osgym())
        vm_id = await reset(http)
        write_yes(served.desktop)
        answers = [(await step(http, vm_id, "type(a)&finish()")).json() for _ in range(3)]
        assert [answer["reward"] for answer in answers] == [1.0] * 3
        assert served.episodes.outcomes == {"evaluated": 1}


async def test_call_user_counts_as_giving_up() -> None:
    async with surfaces() as served:
        http = await served.client(served.osgym())
        reported = (await step(http, await reset(http, INFEASIBLE), "call_user()")).json()
        assert (reported["is_finish"], reported["reward"]) == (True, 1.0)


async def test_joined_calls_are_sent_in_one_piece() -> None:
    async with surfaces() as served:
        http = await served.client(served.osgym())
        await step(http, await reset(http), "click(1,2) & type(a & b, c) & hotkey(ctrl,s)")
        names = [[(call["name"], call["args"]) for call in calls] for calls in served.desktop.acts]
        assert names == [[("click", [1, 2]), ("write", ["a & b, c"]), ("hotkey", ["ctrl", "s"])]]


async def test_screenshot_is_fresh() -> None:
    async with surfaces() as served:
        http = await served.client(served.osgym())
        vm_id = await reset(http)
        served.desktop.screen = 77
        reported = (await http.get("/screenshot", params={"vmId": vm_id})).json()
        assert (base64.b64decode(reported["screenshot"]), reported["vm_id"]) == (PNG + b"77", vm_id)


# What OSGym's own server gets wrong


async def test_reset_leaves_other_vms_alone() -> None:
    async with surfaces(2) as served:
        http = await served.client(served.osgym())
        first, second = await reset(http), await reset(http)
        assert first != second
        for vm_id in (first, second):
            assert (await step(http, vm_id)).status_code == 200


async def test_slow_vm_does_not_hold_up_the_others_of_its_port() -> None:
    async with surfaces(2) as served:
        http = await served.client(served.osgym())
        first, second = await reset(http), await reset(http)
        slow = served.provider.of(served.episodes.find(next(iter(served.episodes)).episode_id).replica_id)
        slow.act_gate = asyncio.Event()
        waiting = asyncio.create_task(step(http, first))
        await asyncio.sleep(0.02)
        assert (await step(http, second)).status_code == 200
        assert not waiting.done()
        slow.act_gate.set()
        assert (await waiting).status_code == 200


async def test_client_from_another_address_is_refused_with_one_clear_error() -> None:
    allowed = ServerSettings.from_environment({"OSGYM_ALLOWED_IPS": "127.0.0.1, 10.1.0.0/16"}).osgym_allowed_ips
    async with surfaces() as served:
        app = served.osgym(allowed=allowed)
        headers = {"X-Forwarded-For": "127.0.0.1"}
        for address in ("10.0.0.9", "::1", "not an address", "2001:db8::1", "::ffff:10.2.0.1"):
            http = await served.client(app, address)
            for answer in (
                await http.post("/reset", json={"task_config": TASK, "timeout": 10}, headers=headers),
                await http.get("/screenshot?vmId=1", headers=headers),
                await http.get("/openapi.json"),
            ):
                assert failure(answer) == (403, "client_error")
        assert served.pool.num_free == 1
        for address in ("127.0.0.1", "10.1.2.3", "::ffff:10.1.2.3"):
            http = await served.client(app, address)
            await http.post("/shutdown", json={"vm_id": await reset(http)})


async def test_a_port_answers_programs_of_other_machines_under_any_host_name_and_refuses_browsers() -> None:
    """OSGym's own client sends no token."""
    environment = {"OSGYM_ALLOWED_IPS": "10.1.0.0/16"}
    async with surfaces(environment=environment) as served:
        settings = ServerSettings.from_environment(environment, osgym={"ports": [free_port()]})
        with osgym_listeners(settings) as (port,):
            http = await served.client(port.make_app(served.episodes), "10.1.2.3")
            http.headers["host"] = "desktops.example:20000"
            body = {"task_config": TASK, "timeout": 10}
            for mark in ({"origin": "http://desktops.example:20000"}, {"user-agent": "Mozilla/5.0 (X11; Linux)"}):
                refused = await http.post("/reset", json=body, headers=mark)
                assert (refused.status_code, refused.json()["fault"]) == (403, "client_error")
            assert served.pool.num_free == 1
            assert (await http.post("/reset", json=body)).status_code == 200


def test_ports_without_a_list_of_addresses_are_not_served() -> None:
    with pytest.raises(SettingsError, match="set OSGYM_ALLOWED_IPS"):
        ServerSettings.from_environment({}, osgym={"ports": [20000]})
    with pytest.raises(SettingsError, match=r"OSGYM_ALLOWED_IPS: 'here'"):
        ServerSettings.from_environment({"OSGYM_ALLOWED_IPS": "127.0.0.1,here"})
    reported = ServerSettings.from_environment(
        {}, osgym={"ports": [20000]}, osgym_allowed_ips=["10.0.0.1"]
    ).osgym_allowed_ips
    assert list(map(str, reported)) == ["10.0.0.1/32"]


async def test_unused_vm_is_closed_and_its_number_is_not_used_again() -> None:
    async with surfaces() as served:
        http = await served.client(served.osgym())
        vm_id = await reset(http, idle_s=0.01)
        num_resets = served.desktop.num_resets
        await asyncio.sleep(0.02)
        await served.episodes.reap_idle()
        await until(lambda: served.pool.num_free == 1)
        assert served.desktop.num_resets == num_resets + 1
        late = await step(http, vm_id)
        assert failure(late) == (400, "client_error")
        assert "it was not used for 0.01 s" in late.json()["message"]
        assert await reset(http) != vm_id


async def test_lost_desktop_is_a_fault_and_every_later_call_says_reset_again() -> None:
    async with surfaces() as served:
        http = await served.client(served.osgym(served.worker(max_vms=1)))
        vm_id = await reset(http)
        served.desktop.alive = False
        first = await step(http, vm_id, "finish()")
        assert failure(first) == (400, "env_fault")
        assert "reward" not in first.json()
        await until(lambda: served.pool.num_free == 1)
        for _ in range(3):
            late = await step(http, vm_id, "finish()")
            assert failure(late) == (400, "client_error")
            assert late.json()["message"].endswith("reset again")
        assert await reset(http), "its share is free at once"
        assert served.episodes.outcomes == {"env_fault": 1}


async def test_grader_that_crashes_is_a_fault_and_not_a_zero() -> None:
    async with surfaces() as served:
        http = await served.client(served.osgym())
        vm_id = await reset(http, CRASHING)
        answer = await step(http, vm_id, "finish()")
        assert failure(answer) == (400, "grader_fault")
        assert failure(await step(http, vm_id, "finish()")) == (400, "client_error")
        await until(lambda: served.pool.num_free == 1)
        assert served.episodes.outcomes == {"grader_fault": 1}


async def test_tampering_finishes_the_episode_with_a_reward_of_zero() -> None:
    async with surfaces() as served:
        http = await served.client(served.osgym())
        vm_id = await reset(http)
        assert (await step(http, vm_id)).status_code == 200
        served.desktop.alive, served.desktop.cause = False, "a program of the desktop made it unusable"
        for _ in range(2):
            answer = await step(http, vm_id, "click(1,1)")
            assert (answer.status_code, answer.json()["is_finish"], answer.json()["reward"]) == (200, True, 0.0)
            assert "made it unusable" in answer.json()["message"]
            assert answer.json()["screenshot"]
        assert served.episodes.outcomes == {"tampering": 1}


async def test_refused_action_does_nothing_and_counts_as_a_wait_when_it_is_sent_again() -> None:
    """OSGym's client would send it again without end."""
    async with surfaces() as served:
        http = await served.client(served.osgym())
        vm_id = await reset(http)
        for action in ("press(nosuchkey)", "fly(1,2)"):
            refused = await step(http, vm_id, action)
            assert failure(refused) == (400, "client_error")
            taken = (await step(http, vm_id, action)).json()
            assert (taken["is_finish"], taken["reward"], taken["message"]) == (False, 0.0, refused.json()["message"])
        assert served.desktop.acts == []
        await step(http, vm_id)
        assert failure(await step(http, vm_id, "fly(1,2)")) == (400, "client_error")


async def test_failure_is_held_back_for_a_client_that_tries_again_at_once() -> None:
    async with surfaces() as served:
        http = await served.client(served.osgym(failure_pace_s=0.15))
        start = time.monotonic()
        assert (await step(http, 5)).status_code == 400
        assert time.monotonic() - start >= 0.15


async def test_step_sent_again_with_its_number_clicks_once() -> None:
    async with surfaces() as served:
        http = await served.client(served.osgym())
        vm_id = await reset(http)
        for _ in range(2):
            assert (await step(http, vm_id, CLICK, step=1)).status_code == 200
        assert len(served.desktop.acts) == 1
        assert failure(await step(http, vm_id, CLICK, step=5)) == (400, "client_error")


# Workers


async def test_vm_numbers_are_valid_only_for_their_worker() -> None:
    async with surfaces(2) as served:
        first, second = await served.client(served.osgym()), await served.client(served.osgym())
        vm_id = await reset(first)
        assert failure(await step(second, vm_id)) == (400, "client_error")
        assert failure(await second.post("/shutdown", json={"vm_id": vm_id})) == (400, "client_error")
        await second.post("/shutdown", json={"vm_id": "all"})
        assert (await step(first, vm_id)).status_code == 200


async def test_shutdown_of_all_closes_only_the_vms_of_this_client_at_this_worker() -> None:
    async with surfaces(4) as served:
        app = served.osgym()
        mine, yours = await served.client(app), await served.client(app, "10.0.0.2")
        kept = await reset(yours)
        closed = [await reset(mine), await reset(mine)]
        answer = await mine.post("/shutdown", json={"vm_id": "all"})
        assert (answer.status_code, answer.json()) == (200, {"vm_id": "all"})
        assert [(await step(mine, vm_id)).status_code for vm_id in closed] == [400, 400]
        assert (await step(yours, kept)).status_code == 200


async def test_second_shutdown_is_not_an_error_and_shutdown_of_an_unknown_vm_is_one() -> None:
    async with surfaces() as served:
        http = await served.client(served.osgym())
        vm_id = await reset(http)
        for _ in range(2):
            answer = await http.post("/shutdown", json={"vm_id": vm_id})
            assert (answer.status_code, answer.json()) == (200, {"vm_id": vm_id})
        await until(lambda: served.pool.num_free == 1)
        assert failure(await http.post("/shutdown", json={"vm_id": 7})) == (400, "client_error")


async def test_worker_holds_no_more_than_its_share() -> None:
    async with surfaces(3) as served:
        http = await served.client(served.osgym(served.worker(max_vms=2)))
        first, _ = await reset(http), await reset(http)
        full = await http.post("/reset", json={"task_config": TASK, "timeout": 10})
        assert failure(full) == (503, "no_capacity")
        assert int(full.headers["retry-after"]) > 0
        assert served.pool.num_free == 1
        waiting = asyncio.create_task(reset(http))
        await http.post("/shutdown", json={"vm_id": first})
        assert await waiting


async def test_cancelled_reset_holds_neither_desktop_nor_share() -> None:
    slow = {**TASK, "config": [{"type": "sleep", "parameters": {"seconds": 30}}]}
    async with surfaces() as served:
        worker = served.worker(max_vms=1)
        resetting = asyncio.create_task(worker.reset(slow, timeout_s=10, client_id="a"))
        await until(lambda: served.pool.num_free == 0)
        assert worker.num_live() == 1
        with pytest.raises(NoCapacityError, match="the 1 VMs of port 1"):
            await worker.reset(TASK, timeout_s=10, client_id="b")
        resetting.cancel()
        await asyncio.wait({resetting})
        await until(lambda: served.pool.num_free == 1)
        assert worker.num_live() == 0
        assert await worker.reset(TASK, timeout_s=10, client_id="b")


# Invalid requests


async def test_request_that_is_not_a_message_is_400_with_one_clear_error() -> None:
    requests: list[tuple[str, Any]] = [
        ("/reset", {"task_config": TASK}),
        ("/reset", {"task_config": TASK, "timeout": 0}),
        ("/reset", {"task_config": TASK, "timeout": 1e9}),
        ("/reset", {"task_config": TASK, "timeout": "soon"}),
        ("/reset", {"task_config": [], "timeout": 10}),
        ("/reset", {"task_config": {"id": "../../x"}, "timeout": 10}),
        ("/step", {"action": CLICK}),
        ("/step", {"action": 5, "vm_id": 1}),
        ("/step", {"action": CLICK, "vm_id": True}),
        ("/step", {"action": CLICK, "vm_id": "1"}),
        ("/step", {"action": CLICK, "vm_id": 10**30}),
        ("/shutdown", {"vm_id": "everything"}),
        ("/shutdown", {"vm_id": None}),
        ("/shutdown", []),
    ]
    async with surfaces() as served:
        http = await served.client(served.osgym())
        for path, body in requests:
            assert failure(await http.post(path, json=body)) == (400, "client_error"), body
        assert served.pool.num_free == 1


async def test_body_that_is_not_json_is_400_and_an_unknown_path_is_404() -> None:
    async with surfaces() as served:
        http = await served.client(served.osgym())
        headers = {"content-type": "application/json"}
        assert failure(await http.post("/step", content=b"{", headers=headers)) == (400, "client_error")
        assert failure(await http.get("/screenshot?vmId=one")) == (400, "client_error")
        assert failure(await http.get("/nothing")) == (404, "client_error")


# On the main port


async def test_main_port_serves_the_surface_under_a_prefix_and_requires_its_own_token() -> None:
    async with surfaces(has_main_port=True, environment={"ENV_SERVER_TOKEN": "secret"}, osgym={"pause_s": 0}) as served:
        http = await served.client()
        body = {"task_config": TASK, "timeout": 10}
        assert (await http.post("/osgym/reset", json=body)).status_code == 401
        http.headers["Authorization"] = "Bearer secret"
        reported = (await http.post("/osgym/reset", json=body)).json()
        answer = await http.post("/osgym/step", json={"action": "finish()", "vm_id": reported["vm_id"]})
        assert (answer.json()["is_finish"], answer.json()["reward"]) == (True, 0.0)


async def test_main_port_checks_the_client_address_too_if_there_is_a_list() -> None:
    async with surfaces(has_main_port=True, environment={"OSGYM_ALLOWED_IPS": "10.0.0.1"}) as served:
        answer = await (await served.client()).get("/osgym/screenshot?vmId=1")
        assert failure(answer) == (403, "client_error")
        assert (await (await served.client()).get("/health")).status_code == 200


async def test_last_answers_are_kept_for_a_few_vms_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("env_server.api.osgym.worker.MAX_KEPT_REPLIES", 1)
    async with surfaces() as served:
        http = await served.client(served.osgym())
        vm_ids = [await reset(http)]
        await step(http, vm_ids[0], "finish()")
        await until(lambda: served.pool.num_free == 1)
        vm_ids.append(await reset(http))
        await step(http, vm_ids[1], "finish()")
        assert [(await step(http, vm_id, "finish()")).status_code for vm_id in vm_ids] == [400, 200]
