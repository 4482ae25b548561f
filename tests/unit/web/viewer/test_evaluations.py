"""What pages say in words: evaluations, the current training, the user's tasks, and how a policy ends an episode."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from effect_samples import ENDS, START, write_three_runs
from episode_samples import make_episode, make_step
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient
from viewer_samples import GSPO, KEY, SFT, SIZE, TASKS, make_played, write_suite

from osworld_pipeline.agent.observation_text import LastAction, observation_text
from osworld_pipeline.domain.episode import EpisodePurpose, SamplingParams
from osworld_pipeline.domain.observation import Observation
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.domain.task import Task
from osworld_pipeline.store import TrajectoryStore
from osworld_pipeline.web.viewer.app import create_app
from osworld_pipeline.web.viewer.episode import task_of_prompt
from osworld_pipeline.web.viewer.settings import ViewerSettings

Read = Callable[[str], str]
TOLD = "[Domain hint]\nos\n[Task]\nMake a folder\nnamed notes.\n[Terminal Output]\n[Task]\nsomething else"


@contextmanager
def reading(state: StateDir) -> Iterator[Read]:
    """Reads pages as text, in one line."""
    with TestClient(create_app(ViewerSettings(state=state)), base_url="http://127.0.0.1:8765") as client:
        yield lambda address: re.sub(r"\s+", " ", re.sub(r"<[^>]+>", "", client.get(address).text))


def evaluate(state: StateDir, key: str, task_id: str, **changes: Any) -> str:
    """Writes one episode of an evaluation, of SFT by default; returns its id."""
    checkpoint_id = changes.pop("checkpoint_id", SFT)
    stage_key = f"eval-{checkpoint_id}-{key}"
    name = f"{stage_key}-{task_id}"
    episode = make_episode(name, task_id=task_id, checkpoint_id=checkpoint_id, stage_key=stage_key, **changes)
    TrajectoryStore(state).write_episodes(name, [episode])
    return name


def test_checkpoints_that_two_graders_scored_are_shown_and_not_compared(own_state: StateDir) -> None:
    for checkpoint_id, version in ((SFT, "7"), (GSPO, "8")):
        evaluate(own_state, "aa", "desktop-basics-find_word-0004", checkpoint_id=checkpoint_id, grader_version=version)
    with reading(own_state) as read:
        page = read(f"/compare?a={SFT}&b={GSPO}&settings=aa")
    assert "Evaluations on different desktop images or graders cannot be compared" in page
    assert "unknown image/grader 7; unknown image/grader 8" in page
    assert "intervals at" not in page


def test_two_checkpoints_of_one_run_are_never_called_an_effect(sample_state: StateDir, tmp_path: Path) -> None:
    with reading(sample_state) as read:
        page = read(f"/compare?a={SFT}&b={GSPO}")
    assert "one run: no significant difference" in page, "six tasks"
    assert "an effect needs 3 training runs" in page
    assert "effect over" not in page
    several = StateDir(tmp_path)
    write_three_runs(several)
    with reading(several) as read:
        page = read(f"/compare?a={START.checkpoint_id}&b={ENDS[1].checkpoint_id}")
    assert "all training runs that differ from these only in seeds" in page
    alone, _, across = page.partition("one run: better")
    assert "+42.9" in alone
    assert "±7.2" in across
    assert "+48.8 effect over 3 runs: better" in across


def test_evaluations_are_named_by_suite_and_settings_on_every_page(own_state: StateDir) -> None:
    for key, temperature in (("aa", 0.6), ("bb", 0.0)):
        name = evaluate(
            own_state, key, "desktop-basics-find_word-0004", sampling=SamplingParams(temperature=temperature)
        )
    with reading(own_state) as read:
        home, compare = read("/"), read("/compare")
        for words in ("heldout · seed 0 · T 0.6", "heldout · seed 0 · T 0 "):
            assert f"{words.strip()} desktop-basics" in home
            assert f"{words.strip()} (desktop-basics)" in compare
        assert "evaluate · heldout · reward" in read(f"/episode/{name}")
        assert "· heldout" in read("/episodes?purpose=evaluate&sort=task")
        assert f"heldout · seed 0 · T 0 · {SFT}" in read(f"/episodes?run=eval-{SFT}-bb")


def test_two_evaluations_of_a_pair_are_offered_by_name(own_state: StateDir) -> None:
    for checkpoint_id in (SFT, GSPO):
        evaluate(own_state, "aa", "mine-a-1", checkpoint_id=checkpoint_id, suite="mine", suite_name="mine")
    with reading(own_state) as read:
        page = read(f"/compare?a={SFT}&b={GSPO}&settings=aa")
    assert "mine · seed 0 · T 0.8 aa" in page
    assert "desktop-basics, osworld · 3 seeds · T 0.8" in page, "the other choice"


def test_a_page_uses_a_suite_name_that_is_recorded_later(own_state: StateDir) -> None:
    with reading(own_state) as read:
        assert "my-suite" not in read("/")
        own_state.reports.mkdir()
        (own_state.reports / f"suite-my-suite-{KEY}.html").write_text("")
        assert "my-suite · 3 seeds · T 0.8" in read("/")


def test_current_training_is_listed_apart_from_imports(own_state: StateDir) -> None:
    at_work = "gspo_phase2-333333333333"
    store = TrajectoryStore(own_state)
    store.write_episodes("w", [
        make_episode("w", purpose=EpisodePurpose.TRAIN, stage_key=at_work, update=26, started_at=1_790_000_000.0),
    ])  # fmt: skip
    store.write_episodes("i", [
        make_episode("i", purpose=EpisodePurpose.IMPORT, checkpoint_id="elsewhere", source_dataset="runs_of_others"),
    ])  # fmt: skip
    with reading(own_state) as read:
        training, _, others = read("/").partition("Training now, or cut short")[2].partition("Played by others")
    assert f"GSPO phase 2 {at_work} 27 updates begun, 1 episode" in training
    assert "newest episode 2026-09-21 14:13 UTC" in training
    assert "elsewhere" not in training
    assert "elsewhere 1 episode" in others
    assert "imported from runs_of_others" in others


@pytest.mark.parametrize("has_suite", [True, False])
def test_the_users_own_task_is_shown_as_in_the_models_prompt(own_state: StateDir, has_suite: bool) -> None:
    name = evaluate(own_state, "aa", "notes", steps=(make_step(0, observation_text=TOLD), make_step(1)))
    if has_suite:
        write_suite(own_state, "mine", notes="Changed since.")
    with reading(own_state) as read:
        assert "Make a folder named notes. " in read(f"/episode/{name}")
        assert ("Changed since." in read("/episodes?task=notes")) is has_suite


def test_an_episode_of_a_users_task_without_a_step_shows_the_suites_instruction_or_the_id(own_state: StateDir) -> None:
    name = evaluate(own_state, "aa", "notes", steps=(), sequences=())
    with reading(own_state) as read:
        assert "success notes SFT" in read(f"/episode/{name}")
    write_suite(own_state, "mine", notes="Make a folder.")
    with reading(own_state) as read:
        assert "success Make a folder. SFT" in read(f"/episode/{name}")


def test_text_that_is_not_a_prompt_gives_no_task() -> None:
    assert (
        task_of_prompt("")
        == task_of_prompt("Task: rename alpha")
        == task_of_prompt("[Accessibility Tree]\n[Task]\nx")
        == ""
    )


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40), st.booleans())
def test_task_is_read_back_from_any_prompt(instruction: str, has_hint: bool) -> None:
    evaluator = {"func": "exact_match", "result": {"type": "vm_command_line", "command": "id"},
                 "expected": {"type": "rule", "rules": {"expected": ""}}}  # fmt: skip
    config = {"id": "t", "instruction": f"Do {instruction}!", "config": [], "evaluator": evaluator}
    task = Task.from_config(config, domain="os" if has_hint else None)
    observation = Observation(screenshot=b"", accessibility_tree="[Task]\nnot this", terminal="$")
    text = observation_text(observation, task, step_index=0, last_action=LastAction(), a11y_max_length=99)
    assert task_of_prompt(text) == task.instruction


def test_policy_that_gives_up_is_quoted_and_not_judged(own_state: StateDir) -> None:
    given_up = make_step(0, action={"action": "terminate", "status": "failure"}, command="FAIL")
    name = evaluate(own_state, "aa", TASKS[0][0], steps=(given_up,))
    with reading(own_state) as read:
        page = read(f"/episode/{name}")
    assert "says that the task cannot be done" in page
    assert "task: failure" not in page


def test_weights_are_shown_as_a_checkpoint_in_an_evaluation_and_as_updates_in_training(own_state: StateDir) -> None:
    with reading(own_state) as read:
        assert f"Weights{GSPO}" in read(f"/episode/eval-{GSPO}-{KEY}-{TASKS[0][0]}-s0")
        assert "Weightsafter 0 updates" in read(f"/episode/{GSPO}-u0000-g00-s00")


def test_screenshot_says_its_size(own_state: StateDir) -> None:
    with reading(own_state) as read:
        assert f"{SIZE[0]} × {SIZE[1]}, as the model saw it" in read(f"/episode/{GSPO}-u0000-g00-s00")


def test_the_link_back_to_a_list_names_the_row_for_any_id(own_state: StateDir) -> None:
    name = 'a"b#c/d e'
    TrajectoryStore(own_state).write_episodes("odd", [make_played(name, ["0" * 64], ())])
    with TestClient(create_app(ViewerSettings(state=own_state)), base_url="http://127.0.0.1:8765") as client:
        assert 'href="/episodes#row-a%22b%23c/d%20e" data-up' in client.get("/episode/a%22b%23c%2Fd%20e").text
        assert '<a class="row-link" id="row-a&#34;b#c/d e"' in client.get("/episodes").text
        group = f"{GSPO}-u0000-g00"
        assert f'run={GSPO}#row-{group}" data-up' in client.get(f"/group/{group}").text
        assert f'<a class="row-link" id="row-{group}"' in client.get("/groups").text
