"""A person takes the mouse of a live desktop on the status page, in a real browser, over a real desktop."""

import os
import re
from collections.abc import Iterator

import httpx
import pytest
from env_server_process import RunningServer, running_env_server
from playwright.sync_api import Page, expect

pytestmark = [pytest.mark.desktop, pytest.mark.slow, pytest.mark.browser]

TOKEN = "a secret"
VIEWER = "http://127.0.0.1:8765"
RECORD = "eval-c-0/a b"
TASK = {
    "id": "make-a-file",
    "instruction": "Make the file yes.txt on the desktop.",
    "config": [{"type": "launch", "parameters": {"command": ["xterm", "-geometry", "70x18+20+40"]}}],
    "evaluator": {
        "func": "exact_match",
        "result": {"type": "vm_command_line", "command": "ls ~/Desktop", "shell": True},
        "expected": {"type": "rule", "rules": {"expected": "yes.txt\n"}},
    },
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("takeover")
    with running_env_server(
        folder, "--screen-size", "640x480", "--allow-takeover", "--viewer-url", VIEWER, token=TOKEN
    ) as running:
        yield running


@pytest.fixture(scope="module")
def viewport() -> tuple[int, int]:
    return 1000, 800


@pytest.fixture
def http(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=120) as client:
        yield client


@pytest.fixture
def episode_id(http: httpx.Client) -> Iterator[str]:
    answer = http.post("/reset", json={"task_config": TASK, "client_id": "a policy", "record_id": RECORD})
    assert answer.status_code == httpx.codes.OK, answer.text
    yield answer.json()["episode_id"]
    http.post("/close", json={"episode_id": answer.json()["episode_id"]})


def enlarge(page: Page, server: RunningServer, episode_id: str) -> None:
    """Enlarges the desktop by the address that names the episode."""
    page.goto(f"{server.url}/status#episode={episode_id}")
    page.get_by_label("This server needs its token").fill(TOKEN)
    page.get_by_role("button", name="Show the replicas").click()
    expect(page.get_by_role("dialog")).to_be_visible()
    expect(page.locator("#zoom-image")).to_have_attribute("src", re.compile("^blob:"))


def num_inputs(http: httpx.Client, episode_id: str) -> int:
    return http.get(f"/v1/episodes/{episode_id}").json()["num_person_inputs"]


def test_a_person_solves_the_task_and_the_episode_is_marked(
    page: Page, server: RunningServer, http: httpx.Client, episode_id: str, complaints: list[str]
) -> None:
    enlarge(page, server, episode_id)
    expect(page.locator("#person-mark")).to_contain_text("Your first input marks this episode as touched")
    page.get_by_role("button", name="Take the mouse").click()
    screen = page.locator("#zoom-image")
    screen.click(position={"x": 200, "y": 150})
    expect(page.locator("#zoom-action")).to_contain_text("pyautogui.click(")
    page.keyboard.type("touch ~/Desktop/'yes'.txt")
    page.keyboard.press("Enter")
    expect(page.locator("#zoom-action")).to_have_text('pyautogui.press("enter")')
    expect(page.locator("#person-mark")).to_contain_text("Touched: a person sent 3 inputs")
    if folder := os.environ.get("OSWORLD_TEST_PICTURES"):
        page.screenshot(path=f"{folder}/takeover.png")
    step = http.post("/step", json={"episode_id": episode_id, "action": "DONE", "pause": 0.5, "step": 1}).json()
    assert step["num_person_inputs"] == 3
    answer = http.post("/evaluate", json={"episode_id": episode_id})
    assert (answer.status_code, answer.json()["fault"]) == (500, "touched")
    assert http.post(f"/v1/episodes/{episode_id}/evaluation").json()["reward"] == 1.0
    expect(page.locator("#zoom-title")).to_contain_text("reward 1")
    assert complaints == []


def test_every_kind_of_input_reaches_the_desktop_as_one_action(
    page: Page, server: RunningServer, http: httpx.Client, episode_id: str, complaints: list[str]
) -> None:
    enlarge(page, server, episode_id)
    page.get_by_role("button", name="Take the mouse").click()
    screen, action = page.locator("#zoom-image"), page.locator("#zoom-action")
    screen.dblclick(position={"x": 100, "y": 100})
    expect(action).to_contain_text("pyautogui.doubleClick(")
    screen.click(position={"x": 500, "y": 400}, button="right")
    expect(action).to_contain_text("pyautogui.rightClick(")
    page.keyboard.press("Escape")
    expect(action).to_have_text('pyautogui.press("esc")')
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Control+c")
    expect(action).to_have_text('pyautogui.hotkey("ctrl", "c")')
    screen.hover(position={"x": 200, "y": 200})
    page.mouse.wheel(0, 300)
    expect(action).to_contain_text("pyautogui.scroll(-3)")
    box = screen.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 100, box["y"] + 100)
    page.mouse.down()
    page.mouse.move(box["x"] + 200, box["y"] + 150, steps=4)
    page.mouse.up()
    expect(action).to_contain_text("pyautogui.dragTo(")
    assert num_inputs(http, episode_id) == 6
    page.keyboard.press("Shift+Escape")
    expect(page.get_by_role("button", name="Take the mouse")).to_be_visible()
    screen.click(position={"x": 200, "y": 150})
    page.keyboard.type("not sent")
    page.wait_for_timeout(1000)
    assert num_inputs(http, episode_id) == 6, "without the mouse nothing is sent"
    assert complaints == []


def test_a_desktop_links_to_its_episode_in_the_viewer_also_after_the_episode_has_ended(
    page: Page, server: RunningServer, http: httpx.Client, episode_id: str
) -> None:
    enlarge(page, server, episode_id)
    address = f"{VIEWER}/episode/eval-c-0%2Fa%20b"
    expect(page.locator("#zoom-record a")).to_have_attribute("href", address)
    page.get_by_role("button", name="Close").click()
    http.post("/close", json={"episode_id": episode_id})
    expect(page.locator(".card .past")).to_contain_text("last: closed")
    expect(page.locator(".card .record a")).to_have_attribute("href", address)
    expect(page.locator(".card .record a")).to_have_text(RECORD)


def test_the_mouse_is_released_when_the_episode_ends(
    page: Page, server: RunningServer, http: httpx.Client, episode_id: str
) -> None:
    enlarge(page, server, episode_id)
    page.get_by_role("button", name="Take the mouse").click()
    expect(page.locator("#zoom-screen.taken")).to_be_visible()
    http.post("/close", json={"episode_id": episode_id})
    expect(page.locator("#zoom-screen.taken")).to_have_count(0)
    expect(page.locator("#person")).to_be_hidden()
