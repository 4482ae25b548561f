"""OSWorld result folders: each attempt is an episode with the grader's score or a fault, each success that can be
expressed is a demonstration, and anything else that a run left is reported."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from import_samples import OPTIONS, png, put_attempt, put_task, read_lines

from osworld_pipeline.datasets.importers.osworld_results import import_osworld_results
from osworld_pipeline.datasets.union.build import build_union_tables
from osworld_pipeline.dialects import load_dialect
from osworld_pipeline.domain.digest import digest_bytes
from osworld_pipeline.domain.episode import Episode, EpisodePurpose, Outcome
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import DatasetError
from osworld_pipeline.store import TrajectoryStore
from osworld_pipeline.tables.owned import read_table

CLICK = "pyautogui.click(3, 4)"


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    return StateDir(tmp_path / "var")


@pytest.fixture
def results(tmp_path: Path) -> Path:
    (tmp_path / "results").mkdir()
    return tmp_path / "results"


def episodes(state: StateDir) -> dict[str, Episode]:
    store = TrajectoryStore(state)
    parts = store.existing_parts("episodes", "import-theirs-")
    return {episode.task_id: episode for part in parts for episode in store.read_episodes(part)}


def demonstrations(state: StateDir) -> dict[str, dict[str, Any]]:
    return {record["task_id"]: record for record in read_lines(state.imports / "theirs" / "demonstrations.jsonl")}


def rejects(state: StateDir) -> dict[str, dict[str, Any]]:
    return {reject["task_id"]: reject for reject in read_lines(state.imports / "theirs" / "rejects.jsonl")}


def test_a_solved_attempt_becomes_an_episode_and_a_demonstration(state: StateDir, results: Path) -> None:
    put_task(state.osworld_repo, "solved")
    put_attempt(results, "solved", [CLICK, "pyautogui.write('hi'); time.sleep(1)", "DONE"], result="0.75\n")
    summary = import_osworld_results(state, results, OPTIONS)
    assert (summary.num_demonstrations, summary.num_episodes, summary.num_rejects) == (1, 1, 0)
    episode = episodes(state)["solved"]
    assert (episode.outcome, episode.purpose, episode.engine) == (
        Outcome.SUCCESS, EpisodePurpose.IMPORT, "some-model",
    )  # fmt: skip
    assert episode.reward is not None
    assert episode.reward.task == 0.75
    assert (episode.source_dataset, episode.licence, episode.checkpoint_id) == ("theirs", "MIT", "")
    assert [step.command for step in episode.steps] == [CLICK, "pyautogui.write('hi'); time.sleep(1)", "DONE"]
    record = demonstrations(state)["solved"]
    assert (record["reward"], record["source_path"]) == (0.75, "pyautogui/screenshot/some-model/os/solved")
    words = [turn["content"][-1]["text"] for turn in record["messages"] if turn["role"] == "assistant"]
    actions = [load_dialect("slime").parse_strict(text).arguments for text in words]
    assert actions == [
        {"action": "left_click", "coordinate": [3, 4]},
        {"action": "type", "text": "hi"},
        {"action": "terminate", "status": "success"},
    ]
    assert words[0].startswith("Action: I see it.\n")


def test_a_step_sees_the_screen_that_the_step_before_left(state: StateDir, results: Path) -> None:
    put_task(state.osworld_repo, "solved")
    put_attempt(results, "solved", [CLICK, CLICK, "DONE"])
    import_osworld_results(state, results, OPTIONS)
    shades = [digest_bytes(png(number)) for number in range(3)]
    assert [step.screenshot_sha256 for step in episodes(state)["solved"].steps] == shades
    assert demonstrations(state)["solved"]["images"] == [f"images/{sha256}.png" for sha256 in shades]
    assert TrajectoryStore(state).read_blob(shades[1]) == png(1)
    assert (state.imports / "theirs" / "images" / f"{shades[1]}.png").read_bytes() == png(1)


def test_an_export_of_ours_from_a_smaller_image_is_read_in_that_images_pixels(state: StateDir, results: Path) -> None:
    put_task(state.osworld_repo, "solved")
    folder = put_attempt(results, "solved", ["pyautogui.click(30, 40)", "DONE"])
    first, *rest = (folder / "traj.jsonl").read_text().splitlines()
    row = json.loads(first) | {"info": {"model_action": {"action": "left_click", "coordinate": [3, 4]}}}
    (folder / "traj.jsonl").write_text("\n".join([json.dumps(row), *rest]))
    import_osworld_results(state, results, OPTIONS)
    said = demonstrations(state)["solved"]["messages"][2]["content"][-1]["text"]
    assert load_dialect("slime").parse_strict(said).arguments == {"action": "left_click", "coordinate": [3, 4]}
    assert episodes(state)["solved"].steps[0].command == "pyautogui.click(30, 40)"


def test_a_run_without_its_first_screen_has_a_first_turn_with_text_only(state: StateDir, results: Path) -> None:
    put_task(state.osworld_repo, "solved")
    put_attempt(results, "solved", [CLICK, "DONE"], first_screen=False)
    import_osworld_results(state, results, OPTIONS)
    record = demonstrations(state)["solved"]
    users = [turn["content"] for turn in record["messages"] if turn["role"] == "user"]
    assert [part["type"] for part in users[0]] == ["text"]
    assert users[1][0] == {"type": "image"}
    assert len(record["images"]) == 1
    assert episodes(state)["solved"].steps[0].screenshot_sha256 == ""


@pytest.mark.parametrize(
    ("actions", "result", "outcome", "error"),
    [
        ([CLICK, "DONE"], "0.4", Outcome.FAILURE, None),
        ([CLICK, "FAIL"], "1", Outcome.SUCCESS, None),
        ([CLICK, CLICK], "0.0", Outcome.TRUNCATED, None),
        ([CLICK, "DONE"], None, Outcome.GRADER_FAULT, "no result.txt"),
        ([CLICK], None, Outcome.ENV_FAULT, "cut short after 1 steps"),
        ([CLICK, "DONE"], "nan", Outcome.GRADER_FAULT, "not a score"),
        ([CLICK, "DONE"], "Traceback", Outcome.GRADER_FAULT, "no number"),
    ],
)
def test_the_outcome_is_the_graders_result_or_a_fault(
    state: StateDir, results: Path, actions: list[str], result: str | None, outcome: Outcome, error: str | None
) -> None:
    put_attempt(results, "some", actions, result=result)
    import_osworld_results(state, results, OPTIONS)
    episode = episodes(state)["some"]
    assert episode.outcome is outcome
    assert (episode.reward is None) == (not episode.outcome.is_valid)
    assert (episode.error is None) == (error is None)
    assert error is None or error in str(episode.error)


def test_a_time_limit_in_the_log_is_a_timeout(state: StateDir, results: Path) -> None:
    folder = put_attempt(results, "slow", [CLICK], result=None)
    with (folder / "traj.jsonl").open("a") as file:
        file.write(json.dumps({"Error": "Time limit exceeded in os/slow"}) + "\n")
    import_osworld_results(state, results, OPTIONS)
    episode = episodes(state)["slow"]
    assert (episode.outcome, episode.reward, len(episode.steps)) == (Outcome.TIMEOUT, None, 1)


def damage_gap(folder: Path) -> None:
    lines = (folder / "traj.jsonl").read_text().splitlines()
    (folder / "traj.jsonl").write_text("\n".join([lines[0], *lines[2:]]))


def damage_last_line(folder: Path) -> None:
    text = (folder / "traj.jsonl").read_text()
    (folder / "traj.jsonl").write_text(text[: len(text) - 40])


def damage_screen(folder: Path) -> None:
    next(folder.glob("step_1_*.png")).unlink()


def damage_pixels(folder: Path) -> None:
    path = next(folder.glob("step_1_*.png"))
    path.write_bytes(path.read_bytes()[:40])


@pytest.mark.parametrize(
    ("damage", "kind", "reason"),
    [
        (damage_gap, "malformed", "step 3 follows step 1"),
        (damage_last_line, "malformed", "line 3 of traj.jsonl: not JSON"),
        (damage_screen, "bad_image", "step 2: the image 'step_1_"),
        (damage_pixels, "bad_image", "step 2: the image 'step_1_"),
    ],
)
def test_a_success_with_parts_missing_is_an_episode_and_not_a_demonstration(
    state: StateDir, results: Path, damage: Any, kind: str, reason: str
) -> None:
    put_task(state.osworld_repo, "torn")
    damage(put_attempt(results, "torn", [CLICK, CLICK, "DONE"]))
    summary = import_osworld_results(state, results, OPTIONS)
    assert (summary.num_demonstrations, summary.num_episodes, summary.num_rejects) == (0, 1, 1)
    assert rejects(state)["torn"]["kind"] == kind
    assert reason in rejects(state)["torn"]["reason"]
    assert episodes(state)["torn"].is_success


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        ("pyautogui.mouseDown()", "step 1: pyautogui.mouseDown is not a known action"),
        ("pyautogui.click(500, 4)", "outside the screen of 64x32"),
        ({"action_type": "CLICK", "parameters": {"x": 3, "y": 4}}, "step 1"),
    ],
)
def test_an_action_that_cannot_be_expressed_is_reported_with_its_step(
    state: StateDir, results: Path, action: Any, reason: str
) -> None:
    put_task(state.osworld_repo, "odd")
    put_attempt(results, "odd", [action, "DONE"])
    import_osworld_results(state, results, OPTIONS)
    assert (rejects(state)["odd"]["kind"], demonstrations(state)) == ("dropped_parse", {})
    assert reason in rejects(state)["odd"]["reason"]
    step = episodes(state)["odd"].steps[0]
    assert (step.action, step.signals.action_parsed) == (None, False)
    assert step.command


def test_a_success_of_an_unknown_task_says_what_is_missing(state: StateDir, results: Path) -> None:
    put_attempt(results, "stranger", [CLICK, "DONE"])
    import_osworld_results(state, results, OPTIONS)
    assert "give its OSWorld checkout with --osworld-path" in rejects(state)["stranger"]["reason"]


def test_a_task_keeps_its_large_integers_and_one_of_two_domains_is_not_guessed(state: StateDir, results: Path) -> None:
    put_task(state.osworld_repo, "large", limit=2**64 + 1)
    for domain in ("chrome", "vlc"):
        put_task(state.osworld_repo, "twin", domain)
    for task_id in ("large", "twin"):
        put_attempt(results, task_id, [CLICK, "DONE"])
    import_osworld_results(state, results, OPTIONS)
    (found,) = read_lines(next(state.imports.glob("*/tasks.jsonl")))
    assert (found["task_id"], json.loads(found["task_config"])["limit"]) == ("large", 2**64 + 1)
    assert set(rejects(state)) == {"twin"}


def test_tasks_of_two_domains_with_one_id_are_both_imported_and_are_two_rows(state: StateDir, results: Path) -> None:
    for domain in ("vlc", "chrome"):
        put_task(state.osworld_repo, "twin", domain, instruction=f"In {domain}.")
        put_attempt(results, "twin", ["pyautogui.click(3, 4)", "DONE"], domain=domain)
    done = import_osworld_results(state, results, OPTIONS)
    assert (done.num_tasks, done.num_demonstrations) == (2, 2)
    shutil.rmtree(state.osworld_repo)
    build_union_tables(state, system_prompt="p")
    rows = [(row["domain"], row["instruction"]) for row in read_table(state, "union_tasks").to_pylist()]
    assert rows == [("chrome", "In chrome."), ("vlc", "In vlc.")]
    assert read_table(state, "train_tasks").num_rows == 0, "a demonstration names the id alone"
    (reject,) = read_table(state, "rejects").to_pylist()
    assert "chrome, vlc each have a task with this id" in reject["reason"]


def test_only_the_last_part_of_a_run_that_was_started_again_counts(state: StateDir, results: Path) -> None:
    put_task(state.osworld_repo, "again")
    folder = put_attempt(results, "again", [CLICK, "DONE"])
    lines = (folder / "traj.jsonl").read_text()
    earlier = {"step_num": 5, "action": "pyautogui.press('a')", "screenshot_file": "gone.png"}
    (folder / "traj.jsonl").write_text(json.dumps(earlier) + "\n" + lines)
    summary = import_osworld_results(state, results, OPTIONS)
    assert summary.num_demonstrations == 1
    assert "rows of earlier runs, which have no result: 1" in rejects(state)["again"]["reason"]
    assert len(episodes(state)["again"].steps) == 2


def test_folders_without_a_trajectory_are_reported(state: StateDir, results: Path) -> None:
    (put_attempt(results, "lost", [CLICK]) / "traj.jsonl").unlink()
    put_attempt(results, "empty", [])
    summary = import_osworld_results(state, results, OPTIONS)
    assert (summary.num_episodes, summary.num_rejects) == (0, 2)
    assert "no traj.jsonl" in rejects(state)["lost"]["reason"]
    assert "no step" in rejects(state)["empty"]["reason"]


def test_a_folder_without_attempts_is_refused(state: StateDir, results: Path) -> None:
    with pytest.raises(DatasetError, match=r"no traj\.jsonl or result\.txt"):
        import_osworld_results(state, results, OPTIONS)


def test_the_sampling_of_a_run_is_read_from_its_arguments(state: StateDir, results: Path) -> None:
    folder = put_attempt(results, "some", [CLICK, "DONE"])
    (folder.parent.parent / "args.json").write_text('{"temperature": 0.7, "top_p": 0.9, "max_steps": 15}')
    import_osworld_results(state, results, OPTIONS)
    episode = episodes(state)["some"]
    assert (episode.sampling.temperature, episode.sampling.top_p, episode.max_turns) == (0.7, 0.9, 15)
    assert episode.started_at == 1735787041.0


def test_importing_again_replaces_episodes_and_folder(state: StateDir, results: Path) -> None:
    put_task(state.osworld_repo, "kept")
    put_attempt(results, "kept", [CLICK, "DONE"])
    for number in range(40):
        put_attempt(results, f"more-{number}", [CLICK], result="0")
    import_osworld_results(state, results, OPTIONS)
    assert len(episodes(state)) == 41
    import_osworld_results(state, results / "pyautogui/screenshot/some-model/os/kept", OPTIONS)
    assert set(episodes(state)) == {"kept"}
    assert set(demonstrations(state)) == {"kept"}
    assert sorted(path.name for path in state.imports.iterdir()) == [".lock", "theirs"]


def test_a_failed_import_leaves_the_earlier_import_unchanged(
    state: StateDir, results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import osworld_pipeline.datasets.importers.osworld_results as module

    put_task(state.osworld_repo, "kept")
    put_attempt(results, "kept", [CLICK, "DONE"])
    import_osworld_results(state, results, OPTIONS)
    put_attempt(results, "later", [CLICK, "DONE"])

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_import_attempt", fail)
    with pytest.raises(KeyboardInterrupt):
        import_osworld_results(state, results, OPTIONS)
    assert set(episodes(state)) == set(demonstrations(state)) == {"kept"}
    assert sorted(path.name for path in state.imports.iterdir()) == [".lock", "theirs"]
