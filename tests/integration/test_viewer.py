"""The trajectory viewer in a real browser, served by the real program: filters, steps, keys, colours, and a store that
is written while a page is open."""

import io
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from PIL import Image
from playwright.sync_api import Browser, Page, expect
from viewer_samples import BUTTON, CLICK, GSPO, KEY, SFT, SIZE, TASKS, make_played, write_sample_store

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.store import TrajectoryStore

pytestmark = [pytest.mark.slow, pytest.mark.browser]

SOLVED = f"/episode/eval-{GSPO}-{KEY}-{TASKS[0][0]}-s0"
FAILED = f"/episode/eval-{SFT}-{KEY}-{TASKS[1][0]}-s0"
PAGES = ("/", "/episodes", SOLVED, f"/group/{GSPO}-u0000-g00", "/groups", f"/compare?a={SFT}&b={GSPO}", "/compare")
MARK = (214, 0, 108)
"""The colour that marks are drawn in."""


@contextmanager
def viewer(state: StateDir, **environment: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Runs the viewer; gives its address and its process."""
    command = [sys.executable, "-m", "osworld_pipeline.cli", "view", "--state", str(state.root), "--port", "0"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **environment}
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+", line)
        assert found, line + process.stdout.read()
        yield found[0], process
    finally:
        process.kill()
        process.wait(10)
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> StateDir:
    state = StateDir(tmp_path_factory.mktemp("viewer"))
    write_sample_store(state)
    return state


@pytest.fixture(scope="module")
def url(state: StateDir) -> Iterator[str]:
    with viewer(state) as (address, _):
        yield address


@pytest.fixture(scope="module")
def viewport() -> tuple[int, int]:
    return 1366, 768


@pytest.fixture(autouse=True)
def quiet(complaints: list[str]) -> Iterator[None]:
    """The console of a page must show no complaints."""
    yield
    assert complaints == []


def shown_step(page: Page) -> str:
    return page.locator("[data-position]").inner_text()


def test_facets_narrow_the_list_without_a_reload_and_each_state_has_an_address(page: Page, url: str) -> None:
    page.goto(f"{url}/episodes")
    page.evaluate("document.body.dataset.isTheSame = 'yes'")
    expect(page.locator(".row-link")).to_have_count(33)
    page.locator("[data-facet=outcome] a", has_text="success").click()
    expect(page.locator("h1")).to_have_text("14 of 33 episodes")
    page.locator("[data-facet=stage] a", has_text="SFT").click()
    expect(page.locator("h1")).to_have_text("3 of 33 episodes")
    expect(page).to_have_url(f"{url}/episodes?outcome=success&stage=sft")
    assert page.evaluate("document.body.dataset.isTheSame") == "yes"
    assert page.evaluate("document.activeElement.dataset.key") == "stage-sft"
    page.go_back()
    expect(page.locator("h1")).to_have_text("14 of 33 episodes")
    page.goto(f"{url}/episodes?outcome=success&stage=sft")
    expect(page.locator(".row-link")).to_have_count(3)
    page.get_by_role("link", name="clear all").click()
    expect(page.locator(".row-link")).to_have_count(33)


def test_search_and_a_condition_in_sql_narrow_the_list(page: Page, url: str) -> None:
    page.goto(f"{url}/episodes")
    page.get_by_label("What the model said").fill("drag the folder")
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_have_text("14 of 33 episodes")
    page.get_by_label("SQL over").fill("shaped_reward < 0.91")
    page.keyboard.press("Enter")
    expect(page.locator(".row-link")).to_have_count(1)
    page.get_by_label("SQL over").fill("no such thing")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("DuckDB refuses the condition")


def test_keys_step_through_an_episode_and_each_step_has_an_address(page: Page, url: str) -> None:
    page.goto(url + SOLVED)
    assert shown_step(page) == "step 1 of 6"
    for key, position in (
        ("ArrowRight", 2),
        ("ArrowRight", 3),
        ("End", 6),
        ("ArrowRight", 6),
        ("ArrowLeft", 5),
        ("Home", 1),
    ):
        page.keyboard.press(key)
        assert shown_step(page) == f"step {position} of 6"
    page.keyboard.press("End")
    expect(page).to_have_url(f"{url}{SOLVED}?step=6")
    page.reload()
    assert shown_step(page) == "step 6 of 6"
    expect(page.locator(".step:visible .what")).to_have_text("says that the task is done")
    page.locator(".tick").nth(3).click()
    expect(page.locator(".step:visible .what")).to_have_text('type "hello there\\n"')
    page.get_by_label("Step", exact=True).focus()
    page.keyboard.press("ArrowRight")
    assert shown_step(page) == "step 5 of 6"


def test_mark_lies_on_the_pixels_that_were_clicked(page: Page, url: str) -> None:
    """The sample clicks the middle of a blue button: the ring on the displayed screen must be around the button."""
    page.goto(f"{url}{SOLVED}?step=3")
    image = page.locator(".step:visible img")
    expect(image).to_have_js_property("complete", True)
    box = image.bounding_box()
    assert box is not None
    shown = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    scale = min(box["width"] / SIZE[0], box["height"] / SIZE[1])
    left = box["x"] + (box["width"] - scale * SIZE[0]) / 2
    top = box["y"] + (box["height"] - scale * SIZE[1]) / 2
    marked = [
        ((x - left) / scale, (y - top) / scale)
        for x in range(int(left), int(left + scale * SIZE[0]))
        for y in range(int(top), int(top + scale * SIZE[1]))
        if sum(abs(one - other) for one, other in zip(shown.getpixel((x, y)), MARK, strict=True)) < 30
    ]
    assert len(marked) > 50
    for axis in (0, 1):
        ends = min(place[axis] for place in marked), max(place[axis] for place in marked)
        assert sum(ends) / 2 == pytest.approx(CLICK[axis], abs=3)
    around = shown.getpixel((int(left + scale * (BUTTON[0] + 6)), int(top + scale * (BUTTON[1] + 6))))
    assert around == (36, 86, 199)
    page.keyboard.press("m")
    expect(page.locator(".step:visible .marks")).not_to_be_visible()


def test_tokens_are_coloured_by_how_likely_they_were(page: Page, url: str) -> None:
    page.goto(url + SOLVED)
    said = page.locator(".step:visible .response")
    text = said.inner_text()
    page.keyboard.press("t")
    expect(page.locator(".step:visible .tok4").first).to_be_visible()
    assert said.inner_text() == text
    assert "0.409%" in (page.locator(".step:visible .tok4").first.get_attribute("title") or "")
    page.keyboard.press("t")
    expect(page.locator(".step:visible .tok")).to_have_count(0)


def test_siblings_are_stepped_together_with_their_advantages(page: Page, url: str) -> None:
    page.goto(f"{url}/group/{GSPO}-u0000-g00")
    expect(page.locator(".lane")).to_have_count(4)
    expect(page.locator(".lane").first).to_contain_text("advantage -0.73")
    page.keyboard.press("End")
    assert shown_step(page) == "step 4 of 4"
    expect(page.locator(".lane.is-over")).to_have_count(2)
    expect(page.locator(".lane").first).to_contain_text("This episode has ended")


def test_two_checkpoints_are_compared_and_their_episodes_shown_side_by_side(page: Page, url: str) -> None:
    page.goto(url)
    page.locator("tr", has_text="gspo_phase1").get_by_role("link", name="against its parent").click()
    expect(page.locator(".verdict")).to_contain_text("25.0% before, 83.3% after, over 6 tasks")
    page.locator("tr", has_text="Rename the folder").get_by_role("link", name="both").click()
    expect(page.locator(".lane")).to_have_count(2)
    expect(page.locator(".lane").nth(0)).to_contain_text("SFT")
    page.keyboard.press("ArrowRight")
    for lane in (0, 1):
        expect(page.locator(".lane").nth(lane).locator(".step:visible")).to_have_attribute("data-step", "1")


def test_keys_alone_open_an_episode_and_its_neighbours_and_return_to_the_list(page: Page, url: str) -> None:
    page.goto(f"{url}/episodes?sort=task&outcome=success")
    page.keyboard.press("j")
    page.keyboard.press("j")
    first = page.evaluate("document.activeElement.getAttribute('href')")
    page.keyboard.press("Enter")
    page.wait_for_url(url + first)
    page.keyboard.press("]")
    page.wait_for_url(lambda address: address != url + first)
    page.keyboard.press("[")
    page.wait_for_url(url + first)
    page.keyboard.press("u")
    expect(page.locator("h1")).to_have_text("14 of 33 episodes")
    expect(page.locator(f"a[href='{first}']")).to_be_focused()
    page.keyboard.press("k")
    page.keyboard.press("j")
    assert page.evaluate("document.activeElement.getAttribute('href')") == first
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "q"
    page.keyboard.press("Escape")
    page.locator("h1").click()
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).not_to_be_visible()


def test_returning_to_a_list_focuses_and_shows_the_row_that_was_open(page: Page, url: str) -> None:
    for path, row in (("/episodes?sort=oldest", 32), ("/groups", 1)):
        page.goto(url + path)
        page.locator(".row-link").nth(row).click()
        page.wait_for_selector("[data-scrubber], .panel")
        page.keyboard.press("u")
        expect(page.locator(".row-link").nth(row)).to_be_focused()
        expect(page.locator(".row-link").nth(row)).to_be_in_viewport()


def test_tab_reaches_every_control_and_the_focused_control_has_an_outline(page: Page, url: str) -> None:
    for path in ("/episodes", SOLVED):
        page.goto(url + path)
        wanted = page.evaluate(
            "[...document.querySelectorAll('a[href], button, input:not([type=hidden]), select, summary')]"
            ".filter((one) => one.checkVisibility({visibilityProperty: true}) && !one.closest('dialog'))"
            ".map((one, index) => (one.dataset.number = index)).length"
        )
        reached = set()
        for _ in range(wanted + 20):
            page.keyboard.press("Tab")
            number, outline = page.evaluate(
                "[document.activeElement.dataset.number, getComputedStyle(document.activeElement).outlineStyle]"
            )
            if number is not None:
                reached.add(number)
                assert outline != "none"
        assert len(reached) == wanted, path


def test_every_picture_and_every_control_has_an_accessible_name(page: Page, url: str) -> None:
    for path in PAGES:
        page.goto(url + path)
        nameless = page.evaluate(
            """[...document.querySelectorAll('img, input:not([type=hidden]), select, button, a[href]')].filter((one) =>
            !(one.alt || one.getAttribute('aria-label') || (one.labels && one.labels.length) || one.textContent.trim()))
            .map((one) => one.outerHTML.slice(0, 120))"""
        )
        assert nameless == [], path
        assert page.locator("h1").count() == 1


@pytest.mark.parametrize("width", [1366, 390])
def test_pages_fit_their_window(page: Page, url: str, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 844})
    for path in PAGES:
        page.goto(url + path)
        assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth"), path
    page.goto(f"{url}/episodes")
    is_phone = width == 390
    expect(page.get_by_role("button", name="Filters")).to_be_visible(visible=is_phone)
    if is_phone:
        expect(page.locator("#facets")).not_to_be_visible()
        page.get_by_role("button", name="Filters").click()
    page.locator("[data-facet=outcome] a", has_text="env fault").click()
    expect(page.locator(".row-link")).to_have_count(1)


def test_a_script_in_a_model_response_is_shown_as_text_and_does_not_run(page: Page, url: str) -> None:
    for path in ("/episode/hostile", "/episodes?sort=oldest"):
        page.goto(url + path)
        page.wait_for_timeout(200)
        assert page.title().endswith("trajectory viewer")
    page.goto(f"{url}/episode/hostile")
    expect(page.locator(".response").first).to_contain_text("<script>document.title='taken over'</script>")


def test_episodes_written_while_the_page_is_open_are_announced_and_shown(page: Page, tmp_path: Path) -> None:
    state = StateDir(tmp_path / "var")
    state.root.mkdir()
    with viewer(state) as (url, process):
        page.goto(f"{url}/episodes")
        expect(page.locator("main")).to_contain_text("osworld-pipeline demo --state")
        store = TrajectoryStore(state)
        store.write_episodes("first", [make_played("e1", ["0" * 64], [])])
        expect(page.locator("#newer")).to_contain_text("1 newer episode in the store")
        page.get_by_role("link", name="show them").click()
        expect(page.locator(".row-link")).to_have_count(1)
        expect(page.locator("#newer")).not_to_be_visible()
        process.send_signal(signal.SIGINT)
        assert process.wait(15) == 0
        assert process.stdout is not None
        assert "Traceback" not in process.stdout.read()


def test_token_is_asked_for_and_kept_out_of_the_address(browser: Browser, state: StateDir) -> None:
    with viewer(state, OSWORLD_VIEWER_TOKEN="a secret") as (url, _):
        context = browser.new_context()
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.goto(f"{url}/episodes?outcome=success")
        page.get_by_label("This viewer needs its token").fill("wrong")
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert")).to_have_text("The viewer refused this token.")
        page.get_by_label("This viewer needs its token").fill("a secret")
        page.keyboard.press("Enter")
        expect(page.locator(".row-link")).to_have_count(14)
        expect(page).to_have_url(f"{url}/episodes?outcome=success")
        page.goto(f"{url}{SOLVED}")
        expect(page.locator(".step:visible img")).to_have_js_property("naturalWidth", SIZE[0])
        context.close()


def test_a_port_in_use_ends_with_one_clear_error(url: str, state: StateDir) -> None:
    port = url.rpartition(":")[2]
    command = [sys.executable, "-m", "osworld_pipeline.cli", "view", "--state", str(state.root), "--port", port]
    second = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert second.returncode == 1
    assert "choose another --port" in " ".join(second.stderr.split())
    assert "Traceback" not in second.stderr
