"""The env client against a scripted transport: every answer of a server has one meaning, and a request that could act
twice is never sent twice."""

import asyncio
import base64
import json
import socket
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from osworld_pipeline.domain.task import Task
from osworld_pipeline.errors import (
    ActionParseError,
    EnvServerError,
    EvaluatorError,
    NoCapacityError,
    ReplicaError,
    TamperingError,
    TaskError,
    TokenEndedError,
    TouchedError,
)
from osworld_pipeline.rollout import env_fleet
from osworld_pipeline.rollout.env_client import EnvClient, EnvTimeouts
from osworld_pipeline.wire import EnvConfig
from osworld_pipeline.wire.run_tokens import ENDED

PNG = b"\x89PNG pixels"
SCREEN = {"screenshot_base64": base64.b64encode(PNG).decode(), "instruction": "do"}
RESET = {
    **SCREEN,
    "episode_id": "e1",
    "replica_id": "r1",
    "provider": "local",
    "image_digest": "i",
    "grader_version": "g",
}
URL = "http://one:8100"
Answers = dict[str, list[Any]]


class ScriptedServer:
    """Answers each path with its responses in turn and then repeats the last one. It keeps the requests."""

    def __init__(self, answers: Answers) -> None:
        self.answers = {path: list(responses) for path, responses in answers.items()}
        self.requests: list[tuple[str, dict[str, Any]]] = []

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content) if request.content else {}
        self.requests.append((str(request.url), body))
        responses = self.answers[request.url.path]
        answer = responses.pop(0) if len(responses) > 1 else responses[0]
        if isinstance(answer, Exception):
            raise answer
        if callable(answer):
            return await answer()
        return answer if isinstance(answer, httpx.Response) else httpx.Response(200, json=answer)

    def paths(self) -> list[str]:
        return [httpx.URL(url).path for url, _ in self.requests]


def failure(status: int, error: str, fault: str | None = None, **headers: str) -> httpx.Response:
    body = {"error": error} | ({"fault": fault} if fault else {})
    return httpx.Response(status, json=body, headers=headers)


@pytest.fixture
def connect() -> Callable[..., tuple[EnvClient, ScriptedServer]]:
    def make(
        answers: Answers, *, urls: str = URL, capacity_s: float = 5.0, resend_s: float = 5.0, **options: Any
    ) -> Any:
        server = ScriptedServer({"/reset": [RESET], "/close": [{"status": "closed", "episode_id": "e1"}], **answers})
        timeouts = EnvTimeouts(request_s=5.0, capacity_s=capacity_s, resend_s=resend_s)
        return EnvClient(urls, timeouts=timeouts, transport=httpx.MockTransport(server), **options), server

    return make


async def test_an_episode_goes_through_all_endpoints(connect: Any, task: Task) -> None:
    client, server = connect(
        {"/step": [{**SCREEN, "terminal": "$"}], "/evaluate": [{"reward": 1.0}]},
        env_config=EnvConfig(screen_size=(512, 320)),
        client_id="trainer",
    )
    async with client:
        desktop = client.desktop()
        observation, info = await desktop.reset(task)
        assert (observation.screenshot, observation.instruction) == (PNG, "do")
        assert (info.replica_id, info.provider, info.image_digest, info.grader_version) == ("r1", "local", "i", "g")
        assert (await desktop.act("WAIT", pause_s=0.5)).terminal == "$"
        assert await desktop.score() == 1.0
        await desktop.close()
        await desktop.close()
    assert server.paths() == ["/reset", "/step", "/evaluate", "/close"]
    assert server.requests[0][1]["task_config"] == task.config
    assert server.requests[0][1]["env_config"]["screen_size"] == [512, 320]
    assert server.requests[1][1] == {"episode_id": "e1", "action": "WAIT", "pause": 0.5, "step": 1}


async def test_a_server_counts_desktops_in_use_until_they_are_released_and_resets_while_they_wait(
    connect: Any, task: Task
) -> None:
    is_asked, may_answer = asyncio.Event(), asyncio.Event()

    async def answer_later() -> httpx.Response:
        is_asked.set()
        await may_answer.wait()
        return httpx.Response(200, json=RESET)

    client, _ = connect({"/reset": [answer_later, failure(500, "no task", "env_fault")], "/health": [{"status": "ok"}]})
    async with client:
        (server,) = client.fleet.servers
        desktop, failing = client.desktop(), client.desktop()
        resetting = asyncio.create_task(desktop.reset(task))
        await is_asked.wait()
        assert (server.num_waiting, server.num_in_use) == (1, 0)
        may_answer.set()
        await resetting
        assert (server.num_waiting, server.num_in_use) == (0, 1)
        with pytest.raises(ReplicaError):
            await failing.reset(task)
        await failing.close()
        assert (server.num_waiting, server.num_in_use) == (0, 1)
        await desktop.close()
        await desktop.close()
        assert (server.num_waiting, server.num_in_use) == (0, 0)


async def test_a_reward_that_a_person_helped_to_earn_is_refused(connect: Any, task: Task) -> None:
    answer = {
        "error": "a person sent 3 inputs to the desktop of this episode",
        "fault": "touched",
        "num_person_inputs": 3,
    }
    touched = httpx.Response(500, json=answer)
    client, _ = connect(
        {"/step": [{**SCREEN, "num_person_inputs": 2}], "/evaluate": [touched]},
    )
    async with client:
        desktop = client.desktop()
        await desktop.reset(task)
        assert (await desktop.act("WAIT", pause_s=0)).num_person_inputs == 2
        with pytest.raises(TouchedError, match="a person sent 3 inputs to the desktop of this episode") as caught:
            await desktop.score()
    assert caught.value.num_inputs == 3


async def test_a_reset_names_the_id_under_which_the_episode_will_be_stored(connect: Any, task: Task) -> None:
    client, server = connect({})
    async with client:
        await client.desktop().reset(task, record_id="stage-u0000-g00-s00")
    assert server.requests[0][1]["record_id"] == "stage-u0000-g00-s00"


async def test_an_adaptive_pause_is_requested_with_every_step(connect: Any, task: Task) -> None:
    client, server = connect({"/step": [SCREEN]}, settle="adaptive")
    async with client:
        desktop = client.desktop()
        await desktop.reset(task)
        await desktop.act("WAIT", pause_s=0.5)
    assert server.requests[1][1]["settle"] == "adaptive"


async def test_a_screenshot_of_megabytes_arrives_whole(connect: Any, task: Task) -> None:
    pixels = bytes(range(256)) * 8192
    client, _ = connect({"/reset": [{**RESET, "screenshot_base64": base64.b64encode(pixels).decode()}]})
    async with client:
        observation, _ = await client.desktop().reset(task)
    assert observation.screenshot == pixels


async def test_episodes_go_to_the_servers_in_turn(connect: Any, task: Task) -> None:
    client, server = connect({}, urls="http://one:8100, http://two:8100/,")
    async with client:
        for _ in range(4):
            await client.desktop().reset(task)
    hosts = [httpx.URL(url).host for url, _ in server.requests]
    assert hosts == ["one", "two", "one", "two"]


async def test_a_full_server_is_asked_again_after_the_time_in_its_answer(connect: Any, task: Task) -> None:
    busy = failure(503, "no free replica", "no_capacity", **{"Retry-After": "0.1"})
    client, server = connect({"/reset": [busy, busy, RESET]})
    async with client:
        await client.desktop().reset(task)
    assert server.paths() == ["/reset"] * 3


async def test_a_server_that_stays_full_is_given_up_within_the_limit(connect: Any, task: Task) -> None:
    busy = failure(503, "4 in the queue", "no_capacity", **{"Retry-After": "0.1"})
    client, _ = connect({"/reset": [busy]}, capacity_s=0.5)
    async with client:
        with pytest.raises(NoCapacityError, match="has no free replica: 4 in the queue"):
            await asyncio.wait_for(client.desktop().reset(task), timeout=3)


async def test_a_reset_keeps_waiting_while_desktops_of_the_client_become_free(connect: Any, task: Task) -> None:
    busy = failure(503, "4 in the queue", "no_capacity", **{"Retry-After": "0.1"})
    client, server = connect({"/reset": [RESET, busy]}, capacity_s=2.0)
    async with client:
        first = client.desktop()
        await first.reset(task)
        waiting = asyncio.ensure_future(client.desktop().reset(task))
        await asyncio.sleep(1.0)
        await first.close()
        await asyncio.sleep(1.2)
        assert not waiting.done(), "2.2 s after its start, and 1.2 s after a desktop became free"
        server.answers["/reset"] = [RESET]
        await asyncio.wait_for(waiting, timeout=10)


async def never() -> httpx.Response:
    await asyncio.sleep(3600)
    raise AssertionError


@pytest.fixture
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env_fleet, "LOOK_INTERVAL_S", 0.02)
    monkeypatch.setattr(env_fleet, "SILENT_S", 0.3)


@pytest.mark.parametrize(
    ("path", "call", "error"),
    [
        ("/step", lambda desktop: desktop.act("WAIT", pause_s=0), ReplicaError),
        ("/evaluate", lambda desktop: desktop.score(), EvaluatorError),
    ],
)
async def test_a_call_to_a_lost_server_is_given_up_long_before_its_time_limit(
    connect: Any, task: Task, quick_looks: None, path: str, call: Any, error: type[Exception]
) -> None:
    client, _ = connect({path: [never], "/health": [httpx.ConnectTimeout("no route")]})
    async with client:
        desktop = client.desktop()
        await desktop.reset(task)
        with pytest.raises(error, match="http://one:8100 does not answer any more"):
            await asyncio.wait_for(call(desktop), timeout=3)


async def test_a_server_that_is_only_slow_to_answer_health_checks_keeps_its_episodes(
    connect: Any, task: Task, quick_looks: None
) -> None:
    async def slow() -> httpx.Response:
        await asyncio.sleep(0.2)
        return httpx.Response(200, json=SCREEN)

    client, server = connect({"/step": [slow], "/health": [httpx.ConnectTimeout("busy")]})
    async with client:
        desktop = client.desktop()
        await desktop.reset(task)
        for _ in range(4):
            await desktop.act("WAIT", pause_s=0)
    assert server.paths().count("/step") == 4


async def test_a_host_that_drops_packets_is_given_up_within_the_connect_timeout() -> None:
    with socket.socket() as listening, socket.socket() as first, socket.socket() as second:
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        for one in (first, second):  # They fill the queue, and the kernel drops the packets of further ones.
            one.setblocking(False)
            one.connect_ex(listening.getsockname())
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        async with EnvClient(url, env_config=EnvConfig(), client_id="test") as client:
            began = time.monotonic()
            with pytest.raises(EnvServerError, match="no env server answers at"):
                await client.health_of(url, connect_s=0.2)
    assert time.monotonic() - began < 3


async def test_the_error_of_an_unreachable_server_names_its_address_and_the_command_to_start_one(
    connect: Any, task: Task
) -> None:
    client, _ = connect({"/reset": [httpx.ConnectError("refused")]}, capacity_s=0.1)
    async with client:
        with pytest.raises(
            EnvServerError, match=r"no env server answers at http://one:8100; start one with: \S*env-server"
        ):
            await client.desktop().reset(task)


async def test_a_reset_moves_on_to_a_running_server_without_a_wait(connect: Any, task: Task) -> None:
    client, server = connect({"/reset": [httpx.ConnectError("refused"), RESET]}, urls="http://one:1,http://two:1")
    async with client:
        await asyncio.wait_for(client.desktop().reset(task), timeout=0.15)
        await client.desktop().reset(task)
    assert [httpx.URL(url).host for url, _ in server.requests] == ["one", "two", "two"]


async def test_each_of_several_full_servers_is_asked_before_the_client_waits(connect: Any, task: Task) -> None:
    busy = failure(503, "no free replica", "no_capacity", **{"Retry-After": "1"})
    client, server = connect({"/reset": [busy, busy, busy, RESET]}, urls="http://one:1,http://two:1,http://three:1")
    async with client:
        started = time.monotonic()
        await client.desktop().reset(task)
    assert sorted(httpx.URL(url).host for url, _ in server.requests[:3]) == ["one", "three", "two"]
    assert 0.7 <= time.monotonic() - started < 1.6, "one wait, as long as the servers said"


async def test_a_reset_requests_a_short_queue_only_where_there_are_several_servers(connect: Any, task: Task) -> None:
    for urls, is_short in (("http://one:1,http://two:1", True), ("http://one:1", False)):
        client, server = connect({}, urls=urls)
        async with client:
            await client.desktop().reset(task)
        queue_s = server.requests[0][1].get("queue_s", 60.0)
        assert (1.5 <= queue_s <= 2.5) == is_short


FAILURES = [
    ("/step", failure(400, "pyautogui.fly is unknown", "client_error"), ActionParseError, "pyautogui.fly is unknown"),
    ("/step", failure(404, "no episode e1"), ReplicaError, "no episode e1"),
    ("/step", failure(500, "Xvfb died", "env_fault"), ReplicaError, "Xvfb died"),
    ("/step", failure(500, "boom"), ReplicaError, "boom"),
    ("/step", httpx.ReadTimeout("slow"), ReplicaError, "did not answer within 5 s"),
    ("/step", httpx.ReadError("reset"), ReplicaError, "broke"),
    ("/step", httpx.Response(200, text="<html>"), EnvServerError, "is this an env server"),
    ("/step", httpx.Response(200, json={**SCREEN, "screenshot_base64": "%%%"}), ReplicaError, "not base64"),
    ("/step", httpx.Response(401, json={"error": "token"}), EnvServerError, "ENV_SERVER_TOKEN"),
    ("/step", httpx.Response(418, text="teapot"), EnvServerError, "answered 418"),
    ("/evaluate", failure(500, "metric crashed", "grader_fault"), EvaluatorError, "metric crashed"),
    ("/evaluate", failure(500, "boom"), EvaluatorError, "boom"),
    ("/evaluate", failure(500, "Xvfb died", "env_fault"), ReplicaError, "Xvfb died"),
    ("/evaluate", failure(500, "it killed Xvfb", "tampering"), TamperingError, "it killed Xvfb"),
    ("/step", failure(500, "it killed Xvfb", "tampering"), TamperingError, "it killed Xvfb"),
    ("/step", failure(500, "a person ended it", "touched"), TouchedError, "a person ended it"),
    ("/evaluate", httpx.ReadTimeout("slow"), EvaluatorError, "did not answer"),
    ("/evaluate", {"reward": 0.0, "error": "KeyError"}, EvaluatorError, "the evaluator crashed: KeyError"),
    ("/evaluate", {"reward": 7}, EvaluatorError, "outside 0..1"),
]


@pytest.mark.parametrize(("path", "answer", "error_class", "message"), FAILURES)
async def test_a_failed_call_is_sent_once_and_raises_the_matching_error(
    connect: Any, task: Task, path: str, answer: Any, error_class: type[Exception], message: str
) -> None:
    client, server = connect({path: [answer]})
    async with client:
        desktop = client.desktop()
        await desktop.reset(task)
        with pytest.raises(error_class) as caught:
            await (desktop.score() if path == "/evaluate" else desktop.act("WAIT", pause_s=0))
        assert message in str(caught.value)
        assert type(caught.value) is error_class
        await desktop.close()
    assert server.paths() == ["/reset", path, "/close"]


OURS = {**RESET, "can_resend": True}
HEALTH = {"status": "ok", "episodes": 1, "can_resend": True}
LOST = [httpx.ReadError("reset by peer"), httpx.ReadTimeout("slow"), httpx.Response(502, text="<html>bad gateway")]


@pytest.mark.parametrize("lost", LOST, ids=["broken", "timeout", "gateway"])
async def test_a_request_whose_answer_was_lost_is_sent_again_with_the_same_number(
    connect: Any, task: Task, lost: Any
) -> None:
    client, server = connect({"/reset": [OURS], "/step": [SCREEN, lost, SCREEN], "/evaluate": [lost, {"reward": 1.0}]})
    async with client:
        desktop = client.desktop()
        await desktop.reset(task)
        await desktop.act("WAIT", pause_s=0)
        await desktop.act("DONE", pause_s=0)
        assert await desktop.score() == 1.0
    assert server.paths() == ["/reset", "/step", "/step", "/step", "/evaluate", "/evaluate"]
    assert [(body["step"], body["action"]) for _, body in server.requests[1:4]] == [
        (1, "WAIT"),
        (2, "DONE"),
        (2, "DONE"),
    ]


async def test_an_answer_that_stays_lost_is_given_up_within_the_limit(connect: Any, task: Task) -> None:
    client, server = connect({"/reset": [OURS], "/step": [httpx.ReadError("reset by peer")]}, resend_s=0.6)
    async with client:
        desktop = client.desktop()
        await desktop.reset(task)
        with pytest.raises(ReplicaError, match="broke: reset by peer"):
            await asyncio.wait_for(desktop.act("WAIT", pause_s=0), timeout=2)
    assert 2 <= server.paths().count("/step") <= 4


async def test_a_request_that_was_answered_with_a_fault_is_not_sent_again(connect: Any, task: Task) -> None:
    client, server = connect({"/reset": [OURS], "/step": [failure(500, "Xvfb died", "env_fault")]})
    async with client:
        desktop = client.desktop()
        await desktop.reset(task)
        with pytest.raises(ReplicaError, match="Xvfb died"):
            await desktop.act("WAIT", pause_s=0)
    assert server.paths() == ["/reset", "/step"]


async def test_the_next_action_uses_the_number_of_a_refused_action(connect: Any, task: Task) -> None:
    client, server = connect({"/reset": [OURS], "/step": [failure(400, "unknown", "client_error"), SCREEN]})
    async with client:
        desktop = client.desktop()
        await desktop.reset(task)
        with pytest.raises(ActionParseError):
            await desktop.act("fly", pause_s=0)
        await desktop.act("WAIT", pause_s=0)
    assert [body["step"] for _, body in server.requests[1:]] == [1, 1]


async def test_a_lost_reset_is_sent_again_with_the_same_request_id_if_the_server_supports_request_ids(
    connect: Any, task: Task
) -> None:
    client, server = connect({"/reset": [httpx.ReadError("reset by peer"), OURS], "/health": [HEALTH]})
    async with client:
        await client.desktop().reset(task)
        await client.desktop().reset(task)
    assert server.paths() == ["/reset", "/health", "/reset", "/reset"]
    names = [body["request_id"] for url, body in server.requests if url.endswith("/reset")]
    assert names[0] == names[1] != names[2]


@pytest.mark.parametrize("health", [{"status": "ok", "episodes": 1}, httpx.ConnectError("refused")])
async def test_a_lost_reset_is_not_sent_again_if_the_server_does_not_support_request_ids(
    connect: Any, task: Task, health: Any
) -> None:
    client, server = connect({"/reset": [httpx.ReadError("reset by peer")], "/health": [health]})
    async with client:
        with pytest.raises(ReplicaError, match="broke"):
            await client.desktop().reset(task)
    assert server.paths() == ["/reset", "/health"]


@pytest.mark.parametrize(
    ("answer", "error_class"),
    [
        (failure(422, "no evaluator", "client_error"), TaskError),
        (failure(500, "launch failed", "env_fault"), ReplicaError),
        (failure(409, "screens are 1920x1080", "client_error"), EnvServerError),
    ],
)
async def test_a_reset_that_failed_for_good_is_not_repeated(
    connect: Any, task: Task, answer: Any, error_class: type[Exception]
) -> None:
    client, server = connect({"/reset": [answer]})
    async with client:
        desktop = client.desktop()
        with pytest.raises(error_class):
            await desktop.reset(task)
        await desktop.close()
    assert server.paths() == ["/reset"]


async def test_a_cancelled_reset_releases_its_replica(connect: Any, task: Task) -> None:
    async def slow() -> httpx.Response:
        await asyncio.sleep(0.2)
        return httpx.Response(200, json=RESET)

    client, server = connect({"/reset": [slow]})
    async with client:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.desktop().reset(task), timeout=0.05)
    assert server.paths() == ["/reset", "/close"]


async def test_the_token_is_sent_as_a_bearer(task: Task) -> None:
    seen: list[str | None] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers.get("Authorization"))
        return httpx.Response(200, json=RESET)

    async with EnvClient(URL, token="secret", transport=httpx.MockTransport(answer)) as client:
        await client.desktop().reset(task)
    assert seen == ["Bearer secret"]


async def test_health_names_the_server_that_does_not_answer(connect: Any) -> None:
    client, _ = connect({"/health": [{"status": "ok", "episodes": 1, "replicas": 4, "free": 3}]})
    async with client:
        (health,) = await client.health()
    assert (health.episodes, health.replicas, health.free) == (1, 4, 3)
    client, _ = connect({"/health": [httpx.ConnectError("refused")]})
    async with client:
        with pytest.raises(EnvServerError, match="no env server answers at http://one:8100"):
            await client.health()


def test_a_client_without_an_address_is_refused() -> None:
    with pytest.raises(EnvServerError, match="no env server address given"):
        EnvClient(" , ")


async def test_an_episode_that_could_not_be_closed_is_closed_once_its_server_answers(connect: Any, task: Task) -> None:
    """Otherwise its desktop would stay leased until the idle timeout, after a network fault."""
    closed = {"status": "closed", "episode_id": "e1"}
    health = {"episodes": 1, "replicas": 2, "free": 1}
    client, server = connect({"/close": [httpx.ConnectTimeout("silent"), closed], "/health": [health]})
    async with client:
        desktop = client.desktop()
        await desktop.reset(task)
        await desktop.close()
        assert server.paths().count("/close") == 1
        await client.health()
        await client.health()
    assert [body for url, body in server.requests if url.endswith("/close")] == [{"episode_id": "e1"}] * 2


async def test_the_error_of_a_refused_token_says_whether_it_has_ended_or_is_wrong(connect, task: Task) -> None:
    for sentence, kind, match in (
        (f"{ENDED}: launch the run again", TokenEndedError, "launch the run again"),
        ("the token is missing or wrong", EnvServerError, "set ENV_SERVER_TOKEN"),
    ):
        client, server = connect({"/reset": [failure(401, sentence, "client_error")]})
        with pytest.raises(kind, match=match):
            await client.desktop().reset(task)
        assert server.paths().count("/reset") == 1
