"""A person solves a task on the status page, in a real browser, and the demonstration becomes a replay row."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from env_server_process import processes_below, running_env_server
from playwright.sync_api import Page, expect

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.recipes import Recipe, load_recipe
from osworld_pipeline.runs.checkpoints.ids import recipe_suite
from osworld_pipeline.runs.rollouts.embedded_server import ServerSpec, embedded_env_server
from osworld_pipeline.runs.sources.union_build import ensure_union
from osworld_pipeline.runs.verify_replay.job import VerificationJob
from osworld_pipeline.tables.catalog import rebuild_catalog
from osworld_pipeline.tables.query import run_query

pytestmark = [pytest.mark.desktop, pytest.mark.slow, pytest.mark.browser, pytest.mark.timeout(300)]

RECIPE = load_recipe("smoke")
RENAME, BUTTON = (recipe_suite(RECIPE).train[index] for index in (0, 2))
READY_S = 120.0


@pytest.fixture(scope="module")
def viewport() -> tuple[int, int]:
    return 1000, 800


class Demonstrating:
    """The command, and what it printed so far."""

    def __init__(self, state: StateDir, task_id: str, *options: str) -> None:
        self.errors = state.root / "stderr.txt"
        state.root.mkdir(parents=True, exist_ok=True)
        command = [
            sys.executable, "-m", "osworld_pipeline.cli", "demonstrate", "--task", task_id, "--recipe", "smoke",
            "--state", str(state.root), "--who", "alice", "--licence", "CC0-1.0", "--json", *options,
        ]  # fmt: skip
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, text=True, env={**os.environ, "COLUMNS": "300"}
            )

    def wait_for(self, pattern: str) -> str:
        deadline = time.monotonic() + READY_S
        while True:
            found = re.search(pattern, self.errors.read_text())
            if found:
                return found[1]
            assert self.process.poll() is None, self.errors.read_text()
            assert time.monotonic() < deadline, self.errors.read_text()
            time.sleep(0.1)

    def result(self) -> tuple[int, dict[str, Any]]:
        output, _ = self.process.communicate(timeout=60)
        return self.process.returncode, json.loads(output)


@contextmanager
def demonstrating(state: StateDir, task_id: str, *options: str) -> Iterator[Demonstrating]:
    running = Demonstrating(state, task_id, *options)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.process.send_signal(signal.SIGINT)
            running.process.communicate(timeout=60)


def enter(page: Page, running: Demonstrating) -> None:
    page.goto(running.wait_for(r"(http\S+/status#episode=\w+)"))
    page.get_by_label("This server needs its token").fill(running.wait_for(r"this token: (\S+)"))
    page.get_by_role("button", name="Show the replicas").click()
    expect(page.locator("#zoom-screen.taken")).to_be_visible()
    expect(page.locator("#zoom-image")).to_have_attribute("src", re.compile("^blob:"))


def verify_all(state: StateDir) -> None:
    """Verifies all demonstrations as the asset verified_replay does."""
    recipe = Recipe.model_validate(
        RECIPE.model_dump(mode="json") | {"replay": {**RECIPE.replay.model_dump(), "verify": "all"}}
    )
    spec = ServerSpec(state=state, num_replicas=1, screen_width=512, screen_height=320)
    with embedded_env_server(spec) as servers:
        job = VerificationJob(recipe=recipe, state_root=state.root, servers=servers).model_dump_json()
        command = [sys.executable, "-m", "osworld_pipeline.runs", "verify_replay", "--print"]
        subprocess.run(command, input=job, text=True, check=True, timeout=120, capture_output=True)


def rows(state: StateDir, sql: str) -> list[tuple[Any, ...]]:
    rebuild_catalog(state)
    return list(run_query(state, sql).rows)


def test_two_tasks_that_a_person_solves_become_verified_replay_rows(page: Page, tmp_path: Path) -> None:
    state = StateDir(tmp_path / "state")
    with demonstrating(state, RENAME.task.task_id) as running:
        enter(page, running)
        expect(page.locator("#zoom-task")).to_contain_text(RENAME.task.instruction)
        page.locator("#zoom-image").click(position={"x": 200, "y": 120})
        expect(page.locator("#person-mark")).to_contain_text("1 so far")
        page.keyboard.type(RENAME.oracle[0].arguments["text"].strip())
        page.keyboard.press("Enter")
        expect(page.locator("#person-mark")).to_contain_text("3 so far")
        if folder := os.environ.get("OSWORLD_TEST_PICTURES"):
            page.wait_for_timeout(800)
            page.screenshot(path=f"{folder}/demonstration.png")
        page.get_by_role("button", name="Done").click()
        expect(page.locator("#person-mark")).to_contain_text("graded: reward 1")
        status, result = running.result()
    assert (status, result["reward"], result["num_steps"], result["is_kept"]) == (0, 1.0, 4, True)
    with demonstrating(state, BUTTON.task.task_id) as running:
        enter(page, running)
        box = page.locator("#zoom-image").bounding_box()
        assert box is not None
        x, y = BUTTON.oracle[0].arguments["coordinate"]
        place = {"x": (x + 0.5) * box["width"] / 512, "y": (y + 0.5) * box["height"] / 320}
        page.locator("#zoom-image").click(position=place)  # pyright: ignore[reportArgumentType]
        expect(page.locator("#person-mark")).to_contain_text("1 so far")
        page.get_by_role("button", name="Done").click()
        assert running.result()[0] == 0
    ensure_union(state, RECIPE)
    verify_all(state)
    found = rows(
        state,
        "SELECT task_id, source_dataset, licence, source_path, dialect, action_types, reward, verified_reward "
        "FROM replay ORDER BY task_id",
    )
    assert [(row[0], row[1], row[2], row[4], row[6], row[7]) for row in found] == [
        (item.task.task_id, "person", "CC0-1.0", "slime", 1.0, 1.0) for item in (BUTTON, RENAME)
    ]
    assert [list(row[5]) for row in found] == [
        ["left_click", "terminate"],
        ["left_click", "type", "key", "terminate"],
    ]
    assert found[1][3] == f"person/alice/{result['episode_id']}"


def test_a_demonstration_that_the_grader_does_not_accept_is_not_kept(page: Page, tmp_path: Path) -> None:
    state = StateDir(tmp_path / "state")
    with demonstrating(state, RENAME.task.task_id) as running:
        enter(page, running)
        page.get_by_role("button", name="Give up").click()
        expect(page.locator("#person-mark")).to_contain_text("graded: reward 0")
        status, result = running.result()
    assert (status, result["reward"], result["is_kept"], result["import"]) == (1, 0.0, False, None)
    assert not (state.imports / "person").exists()


def test_nothing_is_left_of_a_demonstration_whose_program_is_killed(page: Page, tmp_path: Path) -> None:
    state = StateDir(tmp_path / "state")
    with demonstrating(state, RENAME.task.task_id) as running:
        enter(page, running)
        page.locator("#zoom-image").click(position={"x": 200, "y": 120})
        expect(page.locator("#person-mark")).to_contain_text("1 so far")
        below = processes_below(running.process.pid)
        running.process.kill()
        running.process.communicate(timeout=60)
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in below):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert not (state.imports / "person").exists()


def test_a_demonstration_that_is_not_ended_in_time_is_not_kept(tmp_path: Path) -> None:
    state = StateDir(tmp_path / "state")
    with demonstrating(state, RENAME.task.task_id, "--limit-minutes", "0.1") as running:
        running.process.communicate(timeout=READY_S)
    assert running.process.returncode == 1
    error = json.loads(running.errors.read_text().splitlines()[-1])["error"]
    assert error["type"] == "NotEndedError"
    assert "was not ended within 6 s; nothing is kept" in error["message"]
    assert not (state.imports / "person").exists()


def test_a_server_that_takes_no_input_from_a_person_is_refused_with_one_sentence(tmp_path: Path) -> None:
    state = StateDir(tmp_path / "state")
    with (
        running_env_server(tmp_path, "--screen-size", "512x320") as server,
        demonstrating(state, RENAME.task.task_id, "--server", server.url) as running,
    ):
        running.process.communicate(timeout=READY_S)
        assert httpx.get(f"{server.url}/health").json()["episodes"] == 0, "its desktop was released"
    assert running.process.returncode == 1
    assert "start it with --allow-takeover" in running.errors.read_text()
