"""The live page's data: figures and pictures of several real env servers, without their token, within limits."""

import asyncio
import os
import socket
import stat
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from painted_desktops import TASK, PaintedServer, painted_server
from pydantic import SecretStr
from served_viewer import served
from starlette.testclient import TestClient
from viewer_samples import GSPO, KEY, TASKS

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import EnvServerError, PipelineError
from osworld_pipeline.rollout.own_servers import own_server_file, own_servers
from osworld_pipeline.web.viewer.app import create_app
from osworld_pipeline.web.viewer.live import screens, servers
from osworld_pipeline.web.viewer.live.screens import LiveScreens
from osworld_pipeline.web.viewer.live.servers import LiveServers
from osworld_pipeline.web.viewer.settings import ViewerError, ViewerSettings
from osworld_pipeline.wire.live_screens import SMALL_WIDTH, read_screen_records, screen_record

TOKEN = "a server's secret"
STORED = f"eval-{GSPO}-{KEY}-{TASKS[0][0]}-s0"
JPEG = b"\xff\xd8\xff picture"
LIMIT_S = 20.0


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "ASK_INTERVAL_S", 0.05)
    monkeypatch.setattr(servers, "NAME_INTERVAL_S", 0.05)
    monkeypatch.setattr(servers, "OWN_INTERVAL_S", 0.05)
    monkeypatch.setattr(screens, "LOOK_INTERVAL_S", 0.05)
    monkeypatch.setattr(screens, "RETRY_S", 0.05)


@asynccontextmanager
async def painted_servers(folder: Path, count: int, **options: Any) -> AsyncIterator[list[PaintedServer]]:
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(painted_server(folder / str(number), token=SecretStr(TOKEN), **options))
            for number in range(count)
        ]


@asynccontextmanager
async def viewing(state: StateDir, urls: Sequence[str], **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        served(state, env_server_urls=urls, env_server_token=SecretStr(TOKEN), **options) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=LIMIT_S) as client,
    ):
        yield client


async def figures_when(client: httpx.AsyncClient, is_right: Any) -> dict[str, Any]:
    """The figures as soon as `is_right` accepts them."""
    found: dict[str, Any] = {}
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        found = (await client.get("/live/figures")).raise_for_status().json()
        if is_right(found):
            return found
        await asyncio.sleep(0.02)
    raise AssertionError(found)


def states(found: dict[str, Any]) -> list[str]:
    return [server["state"] for server in found["servers"]]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():  # noqa: ASYNC110 - any condition, not only an event
            await asyncio.sleep(0.01)


async def open_episode(server: PaintedServer, record_id: str) -> str:
    async with httpx.AsyncClient(base_url=server.url, headers={"Authorization": f"Bearer {TOKEN}"}) as http:
        answer = await http.post("/reset", json={"task_config": TASK, "record_id": record_id})
        episode_id = answer.raise_for_status().json()["episode_id"]
        step = {"episode_id": episode_id, "action": "pyautogui.click(320, 100)", "pause": 0}
        (await http.post("/step", json=step)).raise_for_status()
    return episode_id


async def test_figures_of_every_server_name_task_step_action_and_the_stored_episode(
    sample_state: StateDir, tmp_path: Path
) -> None:
    async with painted_servers(tmp_path, 2) as (one, other):
        await open_episode(one, STORED)
        await open_episode(other, "not stored yet")
        async with viewing(sample_state, [one.url, other.url]) as client:
            found = await figures_when(client, lambda found: found["stored"] and len(found["servers"]) == 2)
            assert TOKEN not in (await client.get("/live")).text
    assert [server["url"] for server in found["servers"]] == [one.url, other.url]
    first = found["servers"][0]["status"]
    (episode,) = [replica["episode"] for replica in first["replicas"] if replica["episode"]]
    assert (episode["task_id"], episode["num_steps"], episode["action"]) == (
        "rename-note", 1, "pyautogui.click(320, 100)",
    )  # fmt: skip
    assert (episode["points"], episode["reward"]) == ([[320.0, 100.0]], None)
    assert found["stored"] == [STORED]
    assert TOKEN not in str(found)


async def test_one_stream_has_the_pictures_of_desktops_of_several_servers(
    sample_state: StateDir, tmp_path: Path
) -> None:
    async with painted_servers(tmp_path, 2) as both, viewing(sample_state, [one.url for one in both]) as client:
        await figures_when(client, lambda found: states(found) == ["serving", "serving"])
        wanted = {f"{server.url}#stub-{index}" for server in both for index in range(2)}
        seen: dict[str, bytes] = {}
        query = {"width": "480", "desktop": sorted(wanted)}
        async with asyncio.timeout(LIMIT_S), client.stream("GET", "/live/screens", params=query) as answer:
            async for key, picture in read_screen_records(answer.aiter_raw()):
                seen[key] = picture
                if set(seen) == wanted:
                    break
        assert all(picture.startswith(b"\xff\xd8\xff") for picture in seen.values())
        guests = [guest for server in both for guest in server.provider.guests.values()]
        assert {width for guest in guests for width in guest.widths} == {480}
        await until(lambda: not any(guest.num_streams for guest in guests))


async def test_a_server_that_stops_is_shown_without_an_answer_and_then_without_desktops(
    sample_state: StateDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "KEEP_S", 0.5)
    async with painted_servers(tmp_path, 2) as (one, other), viewing(sample_state, [one.url, other.url]) as client:
        await figures_when(client, lambda found: states(found) == ["serving", "serving"])
        await other.stop()
        found = await figures_when(client, lambda found: states(found) == ["serving", "lost"])
        assert "no env server answers at" in found["servers"][1]["problem"]
        await figures_when(client, lambda found: found["servers"][1]["status"] is None)
        port = int(other.url.rpartition(":")[2])
        async with painted_server(tmp_path / "again", token=SecretStr(TOKEN), port=port):
            await figures_when(client, lambda found: states(found) == ["serving", "serving"])


async def test_a_wrong_token_is_named_as_the_problem(sample_state: StateDir, tmp_path: Path) -> None:
    async with (
        painted_server(tmp_path, token=SecretStr("another")) as one,
        viewing(sample_state, [one.url]) as client,
    ):
        found = await figures_when(client, lambda found: states(found) == ["lost"])
    assert "set ENV_SERVER_TOKEN to the one the server was started with" in found["servers"][0]["problem"]


async def test_a_single_picture_has_the_width_asked_for_and_only_known_desktops_have_one(
    sample_state: StateDir, tmp_path: Path
) -> None:
    async with painted_servers(tmp_path, 1) as (one,), viewing(sample_state, [one.url]) as client:
        await figures_when(client, lambda found: states(found) == ["serving"])
        answer = await client.get("/live/picture", params={"desktop": f"{one.url}#stub-0", "width": "480"})
        assert (answer.status_code, answer.headers["content-type"]) == (200, "image/jpeg")
        for key, status in {
            f"{one.url}#stub-9": 404,
            f"{one.url}#../../v1/server": 404,
            "http://127.0.0.1:1#stub-0": 404,
            "nothing": 422,
        }.items():
            assert (await client.get("/live/picture", params={"desktop": key})).status_code == status, key
        wide = {"desktop": f"{one.url}#stub-0", "width": "1920"}
        assert (await client.get("/live/picture", params=wide)).status_code == 422


async def test_the_number_of_streams_is_limited_and_an_ended_one_makes_room(
    sample_state: StateDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(screens, "MAX_STREAMS", 1)
    async with painted_servers(tmp_path, 1) as (one,), viewing(sample_state, [one.url]) as client:
        query = {"desktop": f"{one.url}#stub-0"}
        async with client.stream("GET", "/live/screens", params=query) as first:
            await anext(first.aiter_raw())
            refused = await client.get("/live/screens", params=query)
            assert (refused.status_code, "open already" in refused.text) == (503, True)
        guest = one.provider.guests["stub-0"]
        await until(lambda: not guest.num_streams)
        async with client.stream("GET", "/live/screens", params=query) as second:
            assert second.status_code == 200


async def test_a_stream_ends_when_the_viewer_is_asked_to_stop(sample_state: StateDir, tmp_path: Path) -> None:
    async with painted_servers(tmp_path, 1) as (one,), httpx.AsyncClient(timeout=LIMIT_S) as client:
        async with served(sample_state, env_server_urls=[one.url], env_server_token=SecretStr(TOKEN)) as port:
            address = f"http://127.0.0.1:{port}/live/screens"
            request = client.build_request("GET", address, params={"desktop": f"{one.url}#stub-0"})
            parts = (await client.send(request, stream=True)).aiter_raw()
            await anext(parts)
            reading = asyncio.create_task(read_to_the_end(parts))
        await reading


async def read_to_the_end(parts: AsyncIterator[bytes]) -> None:
    """Raises httpx.RemoteProtocolError: the stream broke off."""
    async for _ in parts:
        continue


async def test_servers_of_a_dns_name_are_added_and_removed(sample_state: StateDir) -> None:
    found = ["10.0.0.1", "10.0.0.2"]

    async def resolve(host: str, port: int) -> list[str]:
        if not found:
            raise OSError("no such name")
        return found

    def silent(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("no route")

    live = LiveServers(["dns+http://env-server:8100"], None, resolve=resolve, transport=httpx.MockTransport(silent))
    try:
        live.watch()
        await until(lambda: list(live.servers) == ["http://10.0.0.1:8100", "http://10.0.0.2:8100"])
        found.remove("10.0.0.1")
        await until(lambda: list(live.servers) == ["http://10.0.0.2:8100"])
        found.clear()
        await until(lambda: bool(live.name_problems))
        assert live.name_problems == {"dns+http://env-server:8100": "no such name"}
        assert list(live.servers) == ["http://10.0.0.2:8100"], "a name that does not resolve keeps its servers"
    finally:
        await live.close()


async def test_no_server_is_queried_while_no_page_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "WATCH_S", 0.2)
    requests: list[float] = []

    def answer(request: httpx.Request) -> httpx.Response:
        requests.append(time.monotonic())
        return httpx.Response(503)

    live = LiveServers(["http://127.0.0.1:8100"], None, transport=httpx.MockTransport(answer))
    try:
        await asyncio.sleep(0.1)
        assert requests == []
        live.watch()
        await asyncio.sleep(0.6)
        asked = len(requests)
        assert asked > 0
        await asyncio.sleep(0.3)
        assert len(requests) == asked
    finally:
        await live.close()


async def test_a_server_that_hangs_is_given_up_and_does_not_delay_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "LIMIT_S", 0.2)

    async def answer(request: httpx.Request) -> httpx.Response:
        if request.url.port == 8101:
            await asyncio.sleep(3600)
        return httpx.Response(200, content=b'{"server": {"screen": "1x1"}, "replicas": []}')

    urls = ["http://127.0.0.1:8101", "http://127.0.0.1:8102"]
    live = LiveServers(urls, None, transport=httpx.MockTransport(answer))
    try:
        live.watch()
        await until(lambda: [one.state for one in live.servers.values()] == ["lost", "serving"])
        assert "did not answer within 0.2 s" in live.servers[urls[0]].problem
    finally:
        await live.close()


async def test_a_page_that_reads_slowly_gets_the_newest_picture_of_a_desktop() -> None:
    pictures = [JPEG + str(number).encode() for number in range(50)]

    async def body() -> AsyncIterator[bytes]:
        for picture in pictures:
            yield screen_record("r0", picture)
        await asyncio.sleep(3600)

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/status/live":
            return httpx.Response(200, content=body())
        return httpx.Response(200, content=b'{"server": {"screen": "1x1"}, "replicas": []}')

    url = "http://127.0.0.1:8100"
    live = LiveServers([url], None, transport=httpx.MockTransport(answer))
    stream = LiveScreens(live).stream([f"{url}#r0"], 480)
    try:
        async with asyncio.timeout(LIMIT_S):
            first = await anext(stream)
            await asyncio.sleep(0.2)
            last = first if first.endswith(pictures[-1]) else await anext(stream)
        assert last == screen_record(f"{url}#r0", pictures[-1])
    finally:
        await stream.aclose()
        await live.close()


@pytest.mark.parametrize(
    "content",
    [b"\x00\x01\x00\x00", screen_record("r0", b"<svg/>"), b"\x00\x00\x00\x02{}", b"\x00\x00\x00\x02[]"],
)
async def test_a_stream_that_does_not_hold_screens_is_refused(content: bytes) -> None:
    async def parts() -> AsyncIterator[bytes]:
        yield content

    with pytest.raises(EnvServerError, match="the stream of screens has"):
        await anext(read_screen_records(parts()))


@pytest.mark.parametrize(
    "address", ["ftp://host", "host:8100", "http://user:secret@host", "http://", "dns+http://name", "ray+http://name"]
)
def test_an_invalid_address_of_an_env_server_is_refused_at_the_start(sample_state: StateDir, address: str) -> None:
    with pytest.raises(PipelineError, match=r"address of (an )?env server") as caught:
        create_app(ViewerSettings(state=sample_state, env_server_urls=[address]))
    assert isinstance(caught.value, ViewerError | EnvServerError)


def test_the_page_allows_pictures_of_its_stream_and_no_foreign_source(sample_state: StateDir) -> None:
    settings = ViewerSettings(state=sample_state, env_server_urls=["http://127.0.0.1:1, http://127.0.0.1:2/"])
    with TestClient(create_app(settings), base_url="http://127.0.0.1:8765") as client:
        page = client.get("/live")
        policy = page.headers["content-security-policy"]
        assert "img-src 'self' blob:;" in policy
        assert "unsafe" not in policy
        assert client.get("/").headers["content-security-policy"].count("blob:") == 0
        assert [one["name"] for one in client.get("/live/figures").json()["servers"]] == ["127.0.0.1:1", "127.0.0.1:2"]
        assert client.post("/live/figures").status_code == 405
        assert client.get("/live/screens").status_code == 422
        assert 'href="/live"' in client.get("/").text


def test_the_viewers_token_is_required_for_live_desktops_too(sample_state: StateDir) -> None:
    settings = ViewerSettings(
        state=sample_state, token=SecretStr("the viewer's"), env_server_urls=["http://127.0.0.1:1"]
    )
    with TestClient(create_app(settings), base_url="http://viewer.test") as client:
        for path in ("/live", "/live/figures", "/live/screens?desktop=http://127.0.0.1:1%23a", "/live/picture"):
            assert client.get(path).status_code == 401, path


def test_without_env_servers_the_page_names_the_option(sample_state: StateDir) -> None:
    with TestClient(create_app(ViewerSettings(state=sample_state)), base_url="http://127.0.0.1:8765") as client:
        assert "--env-server-url http://127.0.0.1:8100" in client.get("/live").text
        assert client.get("/live/figures").json()["servers"] == []


async def test_the_server_of_a_running_program_is_shown_with_its_own_token_until_it_ends(
    own_state: StateDir, tmp_path: Path
) -> None:
    async with (
        painted_server(tmp_path / "own", token=SecretStr("the program's")) as own,
        viewing(own_state, []) as client,
    ):
        with own_server_file(own_state.own_servers, own.url, "the program's") as path:
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            found = await figures_when(client, lambda found: states(found) == ["serving"])
            key = f"{own.url}#{found['servers'][0]['status']['replicas'][0]['id']}"
            picture = await client.get("/live/picture", params={"desktop": key, "width": SMALL_WIDTH})
            assert picture.status_code == httpx.codes.OK
        await figures_when(client, lambda found: found["servers"] == [])


def test_the_file_of_a_dead_program_names_no_server(tmp_path: Path) -> None:
    with own_server_file(tmp_path, "http://127.0.0.1:9", "a token") as path:
        assert list(own_servers(tmp_path)) == ["http://127.0.0.1:9"]
        other_host = path.with_name(path.name.replace(socket.gethostname(), "another-host"))
        path.rename(other_host)
        assert own_servers(tmp_path) == {}
        other_host.rename(path.with_name(path.name.replace(f"-{os.getpid()}-", "-99999999-")))
        assert own_servers(tmp_path) == {}
