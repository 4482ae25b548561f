"""The status page in a real browser, over a real server with two real desktops."""

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import orjson
import pytest
from env_server_process import RunningServer, desktops_below, processes_below, running_env_server
from playwright.sync_api import Page, Route, expect

pytestmark = [pytest.mark.desktop, pytest.mark.slow, pytest.mark.browser]

TOKEN = "a secret"
TASK = {
    "id": "<b>bold</b> task",
    "instruction": "<img src=x onerror=\"document.title='taken over'\"> Type a word.",
    "config": [{"type": "launch", "parameters": {"command": ["xterm", "-geometry", "60x12+20+40"]}}],
    "evaluator": {"func": "infeasible"},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("status")
    with running_env_server(folder, "--screen-size", "640x480", num_replicas=2, token=TOKEN) as running:
        yield running


@pytest.fixture
def http(server: RunningServer) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=60) as client:
        yield client


def log_in(page: Page, server: RunningServer) -> None:
    page.goto(server.url)
    page.get_by_label("This server needs its token").fill(TOKEN)
    page.get_by_role("button", name="Show the replicas").click()
    expect(page.locator(".card")).to_have_count(2)


def open_episode(http: httpx.Client) -> tuple[str, str]:
    """Returns (episode id, replica id). Repeats the request while desktops are being reset on a busy machine."""
    until = time.monotonic() + 180.0
    while True:
        answer = http.post("/reset", json={"task_config": TASK, "client_id": "a <i>client</i>"})
        if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE:
            break
        assert time.monotonic() < until, answer.text
    assert answer.status_code == httpx.codes.OK, answer.text
    reported: dict[str, Any] = answer.json()
    return reported["episode_id"], reported["replica_id"]


def picture_of(page: Page, replica_id: str) -> str:
    """The address of the picture that a card shows. Each new picture has a different address."""
    return page.locator(f"[data-replica={replica_id}] img").get_attribute("src") or ""


def test_page_asks_for_the_token_and_keeps_it_out_of_the_address(
    page: Page, server: RunningServer, complaints: list[str]
) -> None:
    log_in(page, server)
    expect(page.locator(".card img:visible")).to_have_count(2)
    expect(page.locator("#condition")).to_have_text("serving")
    assert page.url == f"{server.url}/status"
    page.reload()
    expect(page.locator(".card")).to_have_count(2)
    assert TOKEN not in page.content()
    assert complaints == []


def test_the_api_page_asks_for_the_token_and_sends_requests_with_it(
    page: Page, server: RunningServer, complaints: list[str]
) -> None:
    page.goto(f"{server.url}/docs")
    page.get_by_label("This server needs its token").fill(TOKEN)
    page.get_by_role("button", name="Show the API").click()
    for surface in ("episodes", "Slime-OSWorld", "AReaL bridge", "OSGym", "probes"):
        expect(page.get_by_role("heading", name=surface, exact=True)).to_be_visible()
    expect(page.locator("summary", has_text="/v1/episodes/{episode_id}/steps")).to_contain_text("Act once")
    page.locator("summary", has_text="GET /v1/server").click()
    page.get_by_role("button", name="Send GET /v1/server").click()
    expect(page.locator("details[open] pre")).to_contain_text('"provider":"local"')
    assert (page.url, TOKEN in page.content()) == (f"{server.url}/docs", False)
    assert complaints == []
    page.locator("summary", has_text="/step").first.click()
    if folder := os.environ.get("OSWORLD_TEST_PICTURES"):
        page.screenshot(path=f"{folder}/api-page.png", full_page=True)


def test_the_api_page_reports_a_wrong_token(page: Page, server: RunningServer) -> None:
    page.goto(f"{server.url}/docs")
    page.locator("#token").fill("wrong")
    page.keyboard.press("Enter")
    expect(page.locator("#token-error")).to_have_text("The server refused this token.")


def test_wrong_token_is_reported_and_may_be_typed_again(page: Page, server: RunningServer) -> None:
    page.goto(server.url)
    page.locator("#token").fill("wrong")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_have_text("The server refused this token.")
    page.locator("#token").fill(TOKEN)
    page.keyboard.press("Enter")
    expect(page.locator(".card")).to_have_count(2)


def test_picture_and_step_number_change_with_a_step_without_a_reload(
    page: Page, server: RunningServer, http: httpx.Client, complaints: list[str]
) -> None:
    log_in(page, server)
    episode_id, replica_id = open_episode(http)
    card = page.locator(f"[data-replica={replica_id}]")
    expect(card.locator(".who")).to_contain_text("step 0")
    expect(card.locator(".task")).to_contain_text("<b>bold</b> task")
    expect(card.locator(".who")).to_contain_text("a <i>client</i>")
    expect(card.locator("img")).to_be_visible()
    before = picture_of(page, replica_id)
    action = {"episode_id": episode_id, "action": "pyautogui.write('echo seen')", "pause": 0.3}
    assert http.post("/step", json=action).status_code == 200
    expect(card.locator(".who")).to_contain_text("step 1")
    expect(card.locator("img")).not_to_have_attribute("src", before)
    http.post("/close", json={"episode_id": episode_id})
    expect(card.locator(".state")).to_contain_text("warm")
    assert page.title() == "env server"
    assert complaints == []


@pytest.mark.parametrize("failure", ["empty", "lost"])
def test_picture_that_failed_to_load_is_fetched_again(page: Page, server: RunningServer, failure: str) -> None:
    requests: list[str] = []

    def fail_first(route: Route) -> None:
        requests.append(route.request.url)
        if len(requests) > 2:
            route.continue_()
        elif failure == "empty":
            route.fulfill(status=204)
        else:
            route.abort()

    page.route("**/status/live*", lambda route: route.abort())
    page.route("**/status/replicas/*/picture*", fail_first)
    log_in(page, server)
    expect(page.locator(".card img:visible")).to_have_count(2)
    assert len(requests) == 4


def test_screen_changes_between_steps_are_shown_live(
    page: Page, server: RunningServer, http: httpx.Client, complaints: list[str]
) -> None:
    episode_id, replica_id = open_episode(http)
    count = "pyautogui.write('while sleep 0.2; do echo $RANDOM; done\\n')"
    http.post("/step", json={"episode_id": episode_id, "action": count, "pause": 0.5})
    log_in(page, server)
    card = page.locator(f"[data-replica={replica_id}]")
    for _ in range(3):
        expect(card.locator("img")).not_to_have_attribute("src", picture_of(page, replica_id))
    page.get_by_role("button", name=f"Enlarge the screen of {replica_id}").click()
    large = page.locator("#zoom-image")
    expect(large).to_have_attribute("src", re.compile("^blob:"))
    for _ in range(3):
        expect(large).not_to_have_attribute("src", large.get_attribute("src") or "")
    assert [one["episode"]["num_steps"] for one in http.get("/status.json").json()["replicas"] if one["episode"]] == [1]
    if folder := os.environ.get("OSWORLD_TEST_PICTURES"):
        page.screenshot(path=f"{folder}/status-zoom.png")
    http.post("/close", json={"episode_id": episode_id})
    assert complaints == []


def test_action_and_text_of_a_step_are_shown_and_the_reward_once_it_is_known(
    page: Page, server: RunningServer, http: httpx.Client, complaints: list[str]
) -> None:
    episode_id, replica_id = open_episode(http)
    log_in(page, server)
    card = page.locator(f"[data-replica={replica_id}]")
    expect(card.locator(".who")).to_contain_text("step 0")
    expect(card.locator(".mark")).to_have_count(0)
    step = {
        "episode_id": episode_id, "action": "pyautogui.click(320, 120)", "pause": 0.3,
        "note": "The <b>list</b> is open.\nI click its first row.",
    }  # fmt: skip
    assert http.post("/step", json=step).status_code == 200
    mark = card.locator(".mark")
    expect(mark).to_have_count(1)
    place = mark.evaluate("one => [one.style.left, one.style.top]")
    assert place == ["50%", "25%"]
    expect(card.locator(".action")).to_have_text("pyautogui.click(320, 120)")
    expect(card.locator(".note")).to_contain_text("The <b>list</b> is open.")
    if folder := os.environ.get("OSWORLD_TEST_PICTURES"):
        page.screenshot(path=f"{folder}/status-step.png")
    assert http.post("/step", json={**step, "action": "FAIL"}).status_code == 200
    assert http.post("/evaluate", json={"episode_id": episode_id}).json()["reward"] == 1.0
    http.post("/close", json={"episode_id": episode_id})
    expect(card.locator(".past")).to_contain_text("last: reward 1 after 2 steps")
    assert complaints == []


def test_the_stream_names_the_replica_of_each_frame_and_needs_the_token(http: httpx.Client) -> None:
    query = {"replica": ["local-0", "unknown"], "width": 160}
    with (
        http.stream("GET", "/status/live", params=query) as first,
        http.stream("GET", "/status/live", params=query) as second,
    ):
        for stream in (first, second):
            part = next(stream.iter_bytes())
            size = int.from_bytes(part[:4], "big")
            assert orjson.loads(part[4 : 4 + size])["replica"] == "local-0"
            assert part[4 + size :].startswith(b"\xff\xd8\xff")
    assert http.get("/status/live").status_code == 422
    assert http.get("/status/live", params=query, headers={"Authorization": "Bearer wrong"}).status_code == 401


def test_killed_desktop_is_shown_as_replaced(page: Page, server: RunningServer, http: httpx.Client) -> None:
    log_in(page, server)
    episode_id, replica_id = open_episode(http)
    card = page.locator(f"[data-replica={replica_id}]")
    expect(card.locator(".state")).to_contain_text("leased")
    for desktop in desktops_below(server.process.pid):
        for pid in processes_below(desktop):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    expect(card.locator(".past")).to_contain_text("1 failure")
    expect(card.locator(".error")).to_contain_text("died")
    expect(card.locator(".state")).to_contain_text("warm")
    expect(card.locator("img")).to_be_visible()
    http.post("/close", json={"episode_id": episode_id})
    expect(page.locator("#totals .bad")).to_contain_text("env fault")


def test_viewing_an_episode_does_not_count_as_use_of_it(page: Page, server: RunningServer, http: httpx.Client) -> None:
    episode_id, replica_id = open_episode(http)
    log_in(page, server)
    expect(page.locator(f"[data-replica={replica_id}] img")).to_be_visible()
    page.get_by_role("button", name=f"Enlarge the screen of {replica_id}").click()
    expect(page.get_by_role("dialog")).to_be_visible()
    expect(page.locator("#zoom-image")).to_have_attribute("src", re.compile("^blob:"))
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).not_to_be_visible()
    listed = http.get("/status.json").json()["replicas"]
    assert [replica["episode"]["num_steps"] for replica in listed if replica["episode"]] == [0]
    http.post("/close", json={"episode_id": episode_id})


@pytest.mark.parametrize("width", [1280, 390])
def test_page_fits_its_window(page: Page, server: RunningServer, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    log_in(page, server)
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    page.locator("#states button", has_text="starting").click()
    expect(page.locator("#none")).to_be_visible()
    expect(page.locator(".card:visible")).to_have_count(0)


def test_status_data_needs_the_token_and_the_page_may_load_nothing_from_elsewhere(server: RunningServer) -> None:
    for path in ("/status.json", "/status/replicas/local-0/picture"):
        assert httpx.get(server.url + path).status_code == 401
    page = httpx.get(f"{server.url}/", follow_redirects=True)
    assert page.status_code == 200
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy


def test_picture_is_as_small_as_requested(http: httpx.Client) -> None:
    small = http.get("/status/replicas/local-0/picture", params={"width": 160})
    large = http.get("/status/replicas/local-0/picture", params={"width": 640})
    assert small.content.startswith(b"\xff\xd8")
    assert len(small.content) < len(large.content)
    assert http.get("/status/replicas/nobody/picture").status_code == 404
    assert http.get("/status/replicas/local-0/picture", params={"width": 1}).status_code == 422
