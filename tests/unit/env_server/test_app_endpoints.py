"""The HTTP surface over desktops in memory: Slime's endpoints, and how each failure is answered."""

import asyncio
import base64
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fake_desktops import PNG, until
from served_app import fault, serving
from surface_server import COMMAND, TASK

from osworld_pipeline.wire import ResetAnswer, StepAnswer
from osworld_pipeline.wire.run_tokens import ENDED, make_run_token


async def test_episode_runs_with_the_calls_of_slimes_client() -> None:
    """The bodies are word for word what its client sends: unknown fields included."""
    async with serving() as server:
        answer = await server.post(
            "/reset",
            task_config={**TASK, "snapshot": "os", "trajectory": "trajectories/"},
            env_config={
                "provider_name": "docker", "os_type": "Ubuntu", "action_space": "pyautogui",
                "screen_size": [1920, 1080], "headless": True, "require_a11y_tree": True, "cache_dir": "x",
            },
        )  # fmt: skip
        fields = answer.json()
        assert fields["instruction"] == "Write yes."
        assert fields["accessibility_tree"] == "<desktop-frame/>"
        assert base64.b64decode(fields["screenshot_base64"]).startswith(PNG)
        episode_id = fields["episode_id"]
        server.provider.desktops[0].on_act = lambda desktop: desktop.commands.update(
            {COMMAND: (200, {"status": "success", "output": "yes\n", "error": "", "returncode": 0})}
        )
        step = await server.post("/step", episode_id=episode_id, action='pyautogui.write("yes")', pause=0)
        assert (step.json()["step"], step.json()["done"], step.json()["reward"]) == (1, False, 0.0)
        last = (await server.post("/step", episode_id=episode_id, action="DONE", pause=0)).json()
        assert (last["step"], last["done"], last["info"]) == (2, True, {"done": True})
        rendered = (await server.post("/render", episode_id=episode_id)).json()
        assert rendered["screenshot_base64"] == last["screenshot_base64"]
        assert (await server.post("/evaluate", episode_id=episode_id)).json()["reward"] == 1.0
        closed = await server.post("/close", episode_id=episode_id)
        assert closed.json() == {"status": "closed", "episode_id": episode_id}
        assert (await server.http.get("/health")).json()["episodes"] == 0


async def test_client_that_does_not_send_settle_gets_the_fixed_pause() -> None:
    async with serving() as server:
        episode_id = await server.reset()
        body = {"episode_id": episode_id, "action": "pyautogui.press('a')", "pause": 0.01}
        for fields in ({}, {"settle": "adaptive"}, {"settle": "fixed"}):
            assert (await server.post("/step", **body, **fields)).status_code == 200
        assert server.provider.desktops[0].settles_s == [None, 0.01, None]
        assert (await server.post("/step", **body, settle="never")).status_code == 422


async def test_health_counts_episodes_and_free_replicas() -> None:
    async with serving(2) as server:
        await server.reset()
        health = (await server.http.get("/health")).json()
        assert (health["status"], health["episodes"], health["replicas"], health["free"]) == ("ok", 1, 2, 1)
        assert (health["active_sessions"], health["max_envs"]) == (1, 2), "as AReaL's bridge calls them"
        assert (await server.http.get("/healthz")).json() == {"status": "ok"}


async def test_reset_answer_names_its_provenance() -> None:
    async with serving() as server:
        fields = (await server.post("/reset", task_config=TASK)).json()
        assert (fields["provider"], fields["image_digest"], fields["replica_id"]) == ("fake", "f" * 64, "fake-0")
        assert fields["grader_version"].startswith("osworld-")


@pytest.mark.parametrize("path", ["/step", "/render", "/evaluate", "/close"])
async def test_unknown_episode_is_404(path: str) -> None:
    async with serving() as server:
        assert fault(await server.post(path, episode_id="none", action="WAIT")) == (404, "client_error")


async def test_closed_episode_is_404_with_the_reason_and_closing_twice_is_fine() -> None:
    async with serving() as server:
        episode_id = await server.reset()
        for _ in range(2):
            assert (await server.post("/close", episode_id=episode_id)).status_code == 200
        answer = await server.post("/step", episode_id=episode_id, action="WAIT", pause=0)
        assert answer.status_code == 404
        assert "it was closed" in answer.json()["error"]


@pytest.mark.parametrize("action", ["import os", "pyautogui.click(open('x'))", "pyautogui.alert('x')", "wait", ""])
async def test_refused_action_is_400_and_nothing_happens(action: str) -> None:
    async with serving() as server:
        episode_id = await server.reset()
        answer = await server.post("/step", episode_id=episode_id, action=action, pause=0)
        assert fault(answer) == (400, "client_error")
        assert server.provider.desktops[0].acts == []
        assert (await server.post("/step", episode_id=episode_id, action="WAIT", pause=0)).json()["step"] == 1


async def test_desktop_that_dies_is_an_env_fault_and_its_replacement_is_soon_free() -> None:
    async with serving() as server:
        episode_id = await server.reset()
        server.provider.desktops[0].alive = False
        for _ in range(2):
            answer = await server.post("/step", episode_id=episode_id, action="WAIT", pause=0)
            assert fault(answer) == (500, "env_fault")
        await until(lambda: server.pool.num_free == 1)
        assert fault(await server.post("/evaluate", episode_id=episode_id)) == (500, "env_fault")
        assert (await server.post("/close", episode_id=episode_id)).status_code == 200
        assert await server.reset()


async def test_desktop_ended_from_inside_is_tampering_only_after_the_first_action() -> None:
    async with serving() as server:
        for has_acted in (False, True):
            episode_id = await server.reset()
            desktop = server.provider.desktops[-1]
            if has_acted:
                assert (await server.post("/step", episode_id=episode_id, action="WAIT", pause=0)).status_code == 200
            desktop.alive, desktop.cause = False, "a program ended it"
            reported = (500, "tampering" if has_acted else "env_fault")
            assert fault(await server.post("/evaluate", episode_id=episode_id)) == reported
            assert fault(await server.post("/step", episode_id=episode_id, action="WAIT", pause=0))[0] == 500
            await server.post("/close", episode_id=episode_id)
        metrics = (await server.http.get("/metrics")).text
        assert 'env_server_episodes_ended_total{outcome="tampering"} 1.0' in metrics


@pytest.mark.parametrize(("lacked", "reported"), [(False, "tampering"), (True, "env_fault")])
async def test_services_that_a_guest_reports_as_disabled_are_tampering_unless_its_host_lacked_memory(
    lacked: bool, reported: str
) -> None:
    async with serving() as server:
        episode_id = await server.reset(env_config={"require_a11y_tree": True})
        desktop = server.provider.desktops[0]
        desktop.disabled, desktop.host_lacked_memory = "the message bus was ended", lacked
        answer = await server.post("/step", episode_id=episode_id, action="WAIT", pause=0)
        assert fault(answer) == (500, reported)
        assert "have disabled the services behind /accessibility: the message bus was ended" in answer.json()["error"]


async def test_evaluator_that_crashes_is_a_grader_fault_and_not_a_zero() -> None:
    task = {**TASK, "evaluator": {"func": "check_text_enlarged", "result": TASK["evaluator"]["result"]}}
    async with serving() as server:
        episode_id = await server.reset(task)
        answer = await server.post("/evaluate", episode_id=episode_id)
        assert fault(answer) == (500, "grader_fault")
        assert "reward" not in answer.json()


async def test_no_free_replica_is_503_with_retry_after() -> None:
    async with serving() as server:
        await server.reset()
        answer = await server.post("/reset", task_config=TASK)
        assert fault(answer) == (503, "no_capacity")
        assert float(answer.headers["retry-after"]) > 0


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"evaluator": None}, "has no evaluator"),
        ({"evaluator": {"func": ""}}, "has no evaluator"),
        ({"id": None}, "no string 'id'"),
        ({"instruction": " "}, "has no instruction"),
        ({"config": [{"type": "googledrive", "parameters": {}}]}, "set-up verb 'googledrive'"),
        ({"config": [{"type": "wait"}]}, "'wait', which does not exist: there are activate_window,"),
        (
            {"evaluator": {"func": "compare_pptx_files"}},
            "metric 'compare_pptx_files', which only OSWorld's desktop-env has",
        ),
        (
            {"evaluator": {"func": "check_includes"}},
            "'check_includes', which does not exist: did you mean check_include_exclude",
        ),
        ({"evaluator": {"func": "exact_match", "result": {"type": "bookmarks"}}}, "getter 'bookmarks'"),
        ({"evaluator": {"func": ["exact_match"] * 2, "result": [{"type": "rule"}]}}, "2 evaluator functions and 1"),
    ],
)
async def test_task_that_cannot_be_run_is_422_and_takes_no_desktop(change: dict[str, Any], sentence: str) -> None:
    async with serving() as server:
        answer = await server.post("/reset", task_config={**TASK, **change})
        assert fault(answer) == (422, "client_error")
        assert sentence in answer.json()["error"]
        assert server.pool.num_free == 1


async def test_set_up_that_fails_is_an_env_fault_and_gives_the_desktop_back() -> None:
    task = {
        **TASK,
        "config": [{"type": "download", "parameters": {"files": [{"url": "http://no.test/", "path": "a"}]}}],
    }
    async with serving() as server:
        assert fault(await server.post("/reset", task_config=task)) == (500, "env_fault")
        await until(lambda: server.pool.num_free == 1)


async def test_other_screen_size_is_409() -> None:
    async with serving(screen_width=640, screen_height=480) as server:
        answer = await server.post("/reset", task_config=TASK, env_config={"screen_size": [800, 600]})
        assert fault(answer) == (409, "client_error")
        assert "--screen-size 800x600" in answer.json()["error"]


async def test_request_that_is_not_a_message_is_422_with_one_clear_error() -> None:
    async with serving() as server:
        answer = await server.post("/step", action="WAIT")
        assert fault(answer) == (422, "client_error")
        assert "episode_id" in answer.json()["error"]


async def test_abandoned_episode_is_reaped_by_idle_time_and_later_calls_get_the_reason() -> None:
    async with serving(idle_ttl_s=0.2) as server:
        episode_id = await server.reset()
        for _ in range(6):
            await asyncio.sleep(0.05)
            answer = await server.post("/render", episode_id=episode_id)
            assert answer.status_code == 200, "an episode in use is never reaped"
        await until(lambda: server.pool.num_free == 1)
        answer = await server.post("/render", episode_id=episode_id)
        assert answer.status_code == 404
        assert "it was not used for 0.2 s" in answer.json()["error"]


async def test_token_is_required_where_one_is_set_but_not_for_health() -> None:
    async with serving(environment={"ENV_SERVER_TOKEN": "secret"}) as server:
        assert (await server.http.get("/health")).status_code == 200
        for header in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic secret"}):
            answer = await server.http.post("/reset", json={"task_config": TASK}, headers=header)
            assert fault(answer) == (401, "client_error")
        answer = await server.http.post(
            "/reset", json={"task_config": TASK}, headers={"Authorization": "Bearer secret"}
        )
        assert answer.status_code == 200


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_body_beyond_the_limit_is_413(is_chunked: bool) -> None:
    body = b'{"episode_id": "' + b"x" * 5000 + b'"}'

    async def chunks() -> AsyncIterator[bytes]:
        yield body

    async with serving(max_body_bytes=1000) as server:
        headers = {"content-type": "application/json"}
        answer = await server.http.post("/render", content=chunks() if is_chunked else body, headers=headers)
        assert fault(answer) == (413, "client_error")


async def test_answer_has_its_keys_in_the_order_of_the_message_and_nothing_else() -> None:
    async with serving() as server:
        reset = await server.post("/reset", task_config=TASK)
        assert list(reset.json()) == list(ResetAnswer.model_fields)
        step = await server.post("/step", episode_id=reset.json()["episode_id"], action="WAIT", pause=0)
        assert list(step.json()) == list(StepAnswer.model_fields)
        assert step.content == StepAnswer.model_validate_json(step.content).model_dump_json().encode()


async def test_step_sent_twice_with_its_number_is_executed_once_and_gets_the_same_answer() -> None:
    async with serving() as server:
        body = {"episode_id": await server.reset(), "action": "pyautogui.press('a')", "pause": 0, "step": 1}
        first, second = await asyncio.gather(server.post("/step", **body), server.post("/step", **body))
        assert first.content == second.content
        assert len(server.provider.desktops[0].acts) == 1
        other = await server.post("/step", **{**body, "action": "DONE"})
        assert fault(other) == (409, "client_error")
        assert fault(await server.post("/step", **{**body, "step": 3})) == (409, "client_error")


async def test_body_that_any_web_page_could_send_is_refused() -> None:
    async with serving() as server:
        for content_type in ("", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
            answer = await server.http.post("/reset", content=b"{}", headers={"content-type": content_type})
            assert fault(answer) == (415, "client_error"), content_type
        assert server.pool.num_free == 1


async def test_malformed_json_is_422_with_one_clear_error() -> None:
    async with serving() as server:
        for body in (b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"episode_id": 1}', b"[" * 100_000):
            answer = await server.http.post("/step", content=body, headers={"content-type": "application/json"})
            assert fault(answer) == (422, "client_error"), body[:20]


async def test_length_that_is_not_a_number_or_too_large_is_413_and_ends_the_connection() -> None:
    async with serving() as server:
        for length in ("-1", "abc", "1e3", "9" * 30, str(100 * 1024 * 1024)):
            headers = {"content-type": "application/json", "content-length": length}
            answer = await server.http.post("/step", content=b"{}", headers=headers)
            assert fault(answer) == (413, "client_error"), length
            assert answer.headers["connection"] == "close"


async def test_strange_token_is_refused_like_any_wrong_one() -> None:
    async with serving(environment={"ENV_SERVER_TOKEN": "secret"}) as server:
        for token in (b"", b"\xff\xfe", "s\u00e9cret".encode(), b"secret\x00", b"x" * 10_000):
            answer = await server.http.get("/v1/replicas", headers={"authorization": b"Bearer " + token})
            assert fault(answer) == (401, "client_error"), token[:20]


async def test_the_token_of_a_run_opens_its_episodes_until_it_expires_but_no_endpoint_for_people() -> None:
    def header(run_token: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {run_token}"}

    good = header(make_run_token("secret", run="5e0c", ends_at=time.time() + 60))
    async with serving(environment={"ENV_SERVER_TOKEN": "secret"}, allow_takeover=True) as server:
        for headers in (header(make_run_token("other", run="5e0c", ends_at=time.time() + 60)), header("run1.a.b.c")):
            assert fault(await server.http.get("/v1/server", headers=headers)) == (401, "client_error")
        ended = await server.http.get("/v1/server", headers=header(make_run_token("secret", run="a", ends_at=1.0)))
        assert fault(ended) == (401, "client_error")
        assert ended.json()["error"].startswith(ENDED)
        answer = await server.http.post("/reset", json={"task_config": TASK}, headers=good)
        assert answer.status_code == 200
        for path, body in (
            ("/v1/server/cordon", {"is_cordoned": True}),
            ("/v1/server/drain", {"deadline_s": 0}),
            (f"/v1/episodes/{answer.json()['episode_id']}/person/next", {"after": 0}),
        ):
            refused = await server.http.post(path, json=body, headers=good)
            assert fault(refused) == (403, "client_error"), path
        cordoned = await server.http.post("/v1/server/cordon", json={"is_cordoned": True}, headers=header("secret"))
        assert cordoned.status_code == 204
        drained = await server.http.post("/v1/server/drain", json={"deadline_s": 0}, headers=header("secret"))
        assert drained.status_code == 200


async def test_access_log_has_one_line_a_request_without_token_query_or_body(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "env_server.access")
    async with serving(environment={"ENV_SERVER_TOKEN": "a secret"}, access_log=True) as server:
        headers = {"Authorization": "Bearer a secret"}
        await server.http.post("/close?file=hidden", json={"episode_id": "an id"}, headers=headers)
        await server.http.get("/x%0aFAKE line", headers=headers)
    lines = [record.getMessage() for record in caplog.records if record.name == "env_server.access"]
    assert len(lines) == 2
    assert lines[0].startswith("POST /close 404 ")
    assert not any(word in "".join(lines) for word in ("a secret", "hidden", "an id", "\n"))


async def test_second_call_waits_for_the_first_of_the_same_episode() -> None:
    async with serving() as server:
        episode_id = await server.reset()
        desktop = server.provider.desktops[0]
        desktop.act_gate = asyncio.Event()
        body = {"episode_id": episode_id, "pause": 0}
        first = asyncio.create_task(server.post("/step", action="pyautogui.press('a')", **body))
        second = asyncio.create_task(server.post("/step", action="DONE", **body))
        await asyncio.sleep(0.05)
        assert not first.done()
        assert not second.done()
        assert (await server.http.get("/health")).status_code == 200
        desktop.act_gate.set()
        assert [answer.json()["step"] for answer in await asyncio.gather(first, second)] == [1, 2]
