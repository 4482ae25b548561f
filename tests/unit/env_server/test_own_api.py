"""Our own API over desktops in memory: named episodes, numbered steps, images in the requested format."""

import base64
import io
from email import message_from_bytes
from email.message import Message
from typing import Any

import httpx
from fake_desktops import PNG, FakeDesktop, until
from PIL import Image
from served_app import Server, fault, serving
from surface_server import CRASHING, TASK, write_yes


def picture(image_format: str) -> bytes:
    buffer = io.BytesIO()
    Image.linear_gradient("L").convert("RGB").save(buffer, image_format.upper(), quality=80)
    return buffer.getvalue()


PICTURES = {name: picture(name) for name in ("png", "jpeg", "webp")}


def with_pictures(server: Server, *formats: str) -> FakeDesktop:
    desktop = server.provider.desktops[0]
    desktop.pictures = {name: PICTURES[name] for name in formats}
    return desktop


async def opened(server: Server, **body: Any) -> str:
    answer = await server.post("/v1/episodes", request_id="r", task_config=TASK, **body)
    assert answer.status_code == 201, answer.text
    return f"/v1/episodes/{answer.json()['episode_id']}"


def parts_of(answer: httpx.Response) -> list[Message]:
    head = f"Content-Type: {answer.headers['content-type']}\r\n\r\n".encode()
    message = message_from_bytes(head + answer.content)
    assert message.get_content_type() == "multipart/mixed"
    parts = message.get_payload()
    assert isinstance(parts, list)
    return parts  # pyright: ignore[reportReturnType]


async def test_episode_runs_from_its_opening_to_its_end() -> None:
    async with serving() as server:
        answer = (await server.post("/v1/episodes", request_id="r", task_config=TASK, client_id="me")).json()
        assert (answer["provider"], answer["replica_id"]) == ("fake", "fake-0")
        assert answer["observation"]["instruction"] == "Write yes."
        url = f"/v1/episodes/{answer['episode_id']}"
        write_yes(server.provider.desktops[0])
        step = (await server.post(f"{url}/steps", step=1, action="DONE", pause=0)).json()
        assert (step["step"], step["is_done"], step["is_repeated"]) == (1, True, False)
        evaluation = (await server.post(f"{url}/evaluation")).json()
        assert evaluation["reward"] == 1.0
        (listed,) = (await server.http.get("/v1/episodes")).json()["episodes"]
        assert listed == (await server.http.get(url)).json() | {"age_s": listed["age_s"], "idle_s": listed["idle_s"]}
        assert (listed["client_id"], listed["num_steps"], listed["reward"]) == ("me", 1, 1.0)
        for _ in range(2):
            assert (await server.http.delete(url)).status_code == 204
        assert fault(await server.http.get(url)) == (404, "client_error")


async def test_opening_sent_twice_under_its_name_gets_one_episode() -> None:
    async with serving() as server:
        assert await opened(server) == await opened(server)
        assert server.provider.desktops[0].num_resets == 0


async def test_step_sent_twice_is_marked_as_repeated_and_executed_once() -> None:
    async with serving() as server:
        url = await opened(server)
        body = {"step": 1, "action": "pyautogui.press('a')", "pause": 0}
        first, second = [(await server.post(f"{url}/steps", **body)).json() for _ in range(2)]
        assert second == {**first, "is_repeated": True}
        assert len(server.provider.desktops[0].acts) == 1
        assert fault(await server.post(f"{url}/steps", **{**body, "step": 5})) == (409, "client_error")


async def test_step_may_ask_for_an_adaptive_pause() -> None:
    async with serving() as server:
        url = await opened(server)
        body = {"action": "pyautogui.press('a')", "pause": 0.01}
        await server.post(f"{url}/steps", **body, step=1)
        await server.post(f"{url}/steps", **body, step=2, settle="adaptive")
        assert server.provider.desktops[0].settles_s == [None, 0.01]


async def test_invalid_step_is_422_and_not_executed() -> None:
    wait = {"step": 1, "action": "WAIT"}
    wrong: list[dict[str, Any]] = [
        {"action": "WAIT"},
        {**wait, "step": 0},
        {**wait, "image_format": "gif"},
        {**wait, "image_quality": 101},
        {**wait, "unknown": 1},
        {**wait, "pause": 61},
        {**wait, "settle": "never"},
    ]
    async with serving() as server:
        url = await opened(server)
        for body in wrong:
            assert fault(await server.post(f"{url}/steps", **body)) == (422, "client_error"), body
        assert (await server.http.get(url)).json()["num_steps"] == 0


async def test_observation_comes_in_two_parts_for_a_client_that_accepts_multipart() -> None:
    headers = {"accept": "multipart/mixed"}
    async with serving() as server:
        with_pictures(server, "jpeg")
        url = await opened(server)
        body = {"step": 1, "action": "WAIT", "pause": 0, "image_format": "jpeg"}
        answer = await server.http.post(f"{url}/steps", json=body, headers=headers)
        reported, image = parts_of(answer)
        assert reported.get_content_type() == "application/json"
        assert b'"screenshot_format":"jpeg"' in reported.get_payload(decode=True)  # pyright: ignore[reportOperatorIssue]
        assert b"screenshot_base64" not in answer.content
        assert image.get_content_type() == "image/jpeg"
        assert PICTURES["jpeg"] in answer.content
        again = await server.http.get(f"{url}/observation", headers=headers)
        assert PICTURES["jpeg"] in again.content


async def test_each_step_has_its_own_image_format_and_quality() -> None:
    async with serving() as server:
        with_pictures(server, "png", "webp")
        url = await opened(server)
        for number, wanted in enumerate(("webp", None), start=1):
            body = {"step": number, "action": "WAIT", "pause": 0, "image_format": wanted, "image_quality": 50}
            answer = (await server.post(f"{url}/steps", **body)).json()
            assert answer["observation"]["screenshot_format"] == (wanted or "png")


async def test_screenshot_has_the_requested_format() -> None:
    """The desktop itself answers PNG and WebP; for JPEG its PNG is re-encoded."""
    async with serving() as server:
        with_pictures(server, "png", "webp")
        server.provider.desktops[0].pictures["jpeg"] = PICTURES["png"]
        url = await opened(server)
        for query, accept, expected in (
            ("", "", "png"),
            ("", "*/*", "png"),
            ("", "image/*", "png"),
            ("", "image/webp", "webp"),
            ("", "image/webp;q=0.5, image/jpeg;q=0.9", "jpeg"),
            ("", "image/png;q=0, image/*;q=0.1", "jpeg"),
            ("?format=jpeg&quality=40", "image/webp", "jpeg"),
            ("?format=webp&fresh=true", "", "webp"),
            ("?format=jpeg&fresh=true", "", "jpeg"),
        ):
            answer = await server.http.get(f"{url}/screenshot{query}", headers={"accept": accept})
            assert answer.headers["content-type"] == f"image/{expected}", (query, accept)
            with Image.open(io.BytesIO(answer.content)) as image:
                assert image.format == expected.upper()


async def test_image_of_a_guest_is_resized_if_the_guest_does_not_resize_it() -> None:
    async with serving() as server:
        with_pictures(server, "png")
        url = await opened(server, env_config={"image_size": [64, 32]})
        seen = (await server.post(f"{url}/steps", step=1, action="WAIT", pause=0)).json()["observation"]
        with Image.open(io.BytesIO(base64.b64decode(seen["screenshot_base64"]))) as image:
            assert image.size == (64, 32)
        assert seen["screen_size"] == [256, 256]


async def test_image_size_of_no_pixels_is_refused() -> None:
    async with serving() as server:
        body = {"request_id": "r", "task_config": TASK, "env_config": {"image_size": [0, 32]}}
        assert (await server.post("/v1/episodes", **body)).status_code == 422


async def test_invalid_request_for_a_screenshot_is_refused() -> None:
    async with serving() as server:
        with_pictures(server, "png")
        url = await opened(server)
        for query, accept, status in (
            ("", "text/html", 406),
            ("?format=gif", "", 422),
            ("?quality=0", "", 422),
            ("?fresh=perhaps", "", 422),
        ):
            answer = await server.http.get(f"{url}/screenshot{query}", headers={"accept": accept})
            assert fault(answer) == (status, "client_error"), (query, accept)


async def test_fresh_look_differs_from_the_last_observation() -> None:
    async with serving() as server:
        url = await opened(server)
        server.provider.desktops[0].screen = 9
        last = await server.http.get(f"{url}/screenshot")
        fresh = await server.http.get(f"{url}/screenshot?fresh=true")
        assert last.content != fresh.content == PNG + b"9"
        assert (await server.http.get(f"{url}/screenshot")).content == last.content, "looking changed nothing"
        seen = await server.http.get(f"{url}/observation?fresh=true", headers={"accept": "multipart/mixed"})
        assert PNG + b"9" in seen.content
        assert (await server.http.get(f"{url}/screenshot")).content == PNG + b"9"


async def test_replicas_are_listed_with_their_state_and_the_reason_of_their_failure() -> None:
    async with serving(2) as server:
        await opened(server)
        server.provider.desktops[1].alive = False
        await until(lambda: len(server.provider.desktops) == 3 and server.pool.num_free == 1)
        answer = (await server.http.get("/v1/replicas")).json()
        leased, replaced = answer["replicas"]
        assert (leased["state"], leased["num_starts"], leased["num_failures"]) == ("leased", 1, 0)
        assert leased["episode"]["task_id"] == "t1"
        assert (replaced["state"], replaced["num_starts"], replaced["num_failures"]) == ("warm", 2, 1)
        assert "fake-1 died" in replaced["last_error"]
        assert replaced["episode"] is None


async def test_screenshot_of_a_replica_does_not_affect_its_episode() -> None:
    async with serving() as server:
        with_pictures(server, "png")
        url = await opened(server)
        before = (await server.http.get(url)).json()["idle_s"]
        answer = await server.http.get("/v1/replicas/fake-0/screenshot")
        assert (answer.status_code, answer.headers["content-type"]) == (200, "image/jpeg")
        assert (await server.http.get(url)).json()["idle_s"] > before
        assert fault(await server.http.get("/v1/replicas/fake-7/screenshot")) == (404, "client_error")


async def test_screenshot_of_a_dead_replica_is_503() -> None:
    async with serving() as server:
        server.provider.desktops[0].alive = False
        answer = await server.http.get("/v1/replicas/fake-0/screenshot")
        assert fault(answer) == (503, "no_capacity")


async def test_video_is_started_ended_and_fetched_and_a_refused_call_is_not_a_fault_of_the_episode() -> None:
    async with serving() as server:
        url = await opened(server)
        assert fault(await server.post(f"{url}/recording/end")) == (409, "client_error")
        assert (await server.post(f"{url}/recording/start")).status_code == 204
        assert fault(await server.post(f"{url}/recording/start")) == (409, "client_error")
        video = await server.post(f"{url}/recording/end")
        assert (video.headers["content-type"], video.content) == ("video/mp4", b"video")
        await server.http.delete(url)
        assert server.app.state.episodes.outcomes == {"closed": 1}


async def test_server_reports_the_settings_that_its_figures_depend_on() -> None:
    async with serving(3, screen_width=640, screen_height=480) as server:
        fields = (await server.http.get("/v1/server")).json()
        assert (fields["provider"], fields["num_replicas"], fields["screen_size"]) == ("fake", 3, [640, 480])
        assert fields["grader_version"].startswith("osworld-")
        assert fields["limits"]["idle_ttl_s"] == 900


async def test_a_cordoned_server_refuses_new_episodes_and_continues_the_others() -> None:
    async with serving(2) as server:
        url = await opened(server)
        assert (await server.post("/v1/server/cordon", is_cordoned=True)).status_code == 204
        assert fault(await server.post("/v1/episodes", request_id="another", task_config=TASK)) == (503, "no_capacity")
        assert (await server.http.get("/health")).json()["status"] == "draining"
        assert (await server.http.get("/v1/server")).json()["is_draining"]
        assert (await server.post(f"{url}/steps", step=1, action="WAIT", pause=0)).status_code == 200
        assert (await server.post("/v1/server/cordon", is_cordoned=False)).status_code == 204
        assert (await server.post("/v1/episodes", request_id="another", task_config=TASK)).status_code == 201


async def test_a_drain_request_needs_a_valid_deadline_and_no_other_field() -> None:
    bodies: list[dict[str, Any]] = [
        {},
        {"deadline_s": -1},
        {"deadline_s": 1e9},
        {"deadline_s": 1, "is_cordoned": False},
    ]
    async with serving() as server:
        for body in bodies:
            assert fault(await server.post("/v1/server/drain", **body)) == (422, "client_error"), body
        assert not server.pool.is_draining


async def test_a_client_may_ask_for_a_shorter_wait_for_a_desktop() -> None:
    async with serving(1, queue_timeout_s=30.0) as server:
        await opened(server)
        answer = await server.post("/v1/episodes", request_id="another", task_config=TASK, queue_s=0.05)
        assert fault(answer) == (503, "no_capacity")
        assert "within 0.05 s" in answer.json()["error"]
        answer = await server.post("/reset", task_config=TASK, queue_s=0.05)
        assert "within 0.05 s" in answer.json()["error"]


async def test_crashed_grader_and_dead_desktop_are_faults_without_a_reward() -> None:
    async with serving() as server:
        answer = await server.post("/v1/episodes", request_id="r", task_config=CRASHING)
        url = f"/v1/episodes/{answer.json()['episode_id']}"
        evaluation = await server.post(f"{url}/evaluation")
        assert fault(evaluation) == (500, "grader_fault")
        assert "reward" not in evaluation.json()
        server.provider.desktops[0].alive = False
        assert fault(await server.post(f"{url}/steps", step=1, action="WAIT", pause=0)) == (500, "env_fault")
        assert (await server.http.get(url)).json()["reward"] is None
