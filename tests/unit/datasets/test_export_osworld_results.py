"""OSWorld's result tree out of evaluations: its counting rule gives our success rate, and a fault is never a zero."""

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from export_samples import episode, make_state, picture, step, task_row
from PIL import Image

from osworld_pipeline.datasets.exporters.osworld_results import ResultsExport, export_osworld_results
from osworld_pipeline.datasets.exporters.selection import Selection
from osworld_pipeline.datasets.importers.folder import ImportOptions
from osworld_pipeline.datasets.importers.osworld_results import import_osworld_results
from osworld_pipeline.domain.episode import Outcome
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.evaluation.scores import read_scores
from osworld_pipeline.store import TrajectoryStore
from osworld_pipeline.tables.owned import write_table


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[StateDir, Path, ResultsExport]:
    folder = tmp_path_factory.mktemp("results")
    state = make_state(folder / "var")
    return state, folder / "out", export_osworld_results(state, folder / "out")


def rows_of(place: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (place / "traj.jsonl").read_text().splitlines()]


def show_result(model: Path) -> list[float]:
    """Counts as OSWorld's script does: the results of each domain's tasks that have one."""
    places = [task for domain in model.iterdir() if domain.is_dir() for task in domain.iterdir()]
    return [float((place / "result.txt").read_text()) for place in places if (place / "result.txt").is_file()]


def test_the_tree_is_osworlds_and_a_second_seed_is_a_model_of_its_own(exported) -> None:
    _, out, done = exported
    places = sorted(str(path.parent.relative_to(out)) for path in out.rglob("traj.jsonl"))
    assert places == [
        "pyautogui/screenshot/gspo-1/os/a",
        "pyautogui/screenshot/sft-1/chrome/b",
        "pyautogui/screenshot/sft-1/os/a",
        "pyautogui/screenshot/sft-1_run2/os/a",
    ]
    assert (done.num_episodes, done.num_results, done.num_faults, done.num_successes) == (4, 3, 1, 2)
    assert sorted(done.models) == ["gspo-1", "sft-1", "sft-1_run2"]


def test_a_fault_has_a_trajectory_and_no_result(exported) -> None:
    _, out, _ = exported
    place = out / "pyautogui/screenshot/sft-1/chrome/b"
    assert not (place / "result.txt").exists()
    assert len(rows_of(place)) == 1
    assert json.loads((place / "episode.json").read_text())["error"] == "the desktop died"


def test_success_over_the_result_files_equals_the_evaluations(exported) -> None:
    state, out, _ = exported
    models = out / "pyautogui" / "screenshot"
    for score in read_scores(state):
        results = [result for model in models.glob(f"{score.checkpoint_id}*") for result in show_result(model)]
        assert len(results) == score.n
        assert sum(results) / len(results) == score.success_rate


def test_a_screenshot_shows_the_screen_after_its_action(exported) -> None:
    _, out, _ = exported
    place = out / "pyautogui/screenshot/sft-1/os/a"
    rows = rows_of(place)
    # The model saw shades 1, 2 and 3; DONE touches nothing, so the last screen is the one it saw.
    assert [(place / row["screenshot_file"]).read_bytes() for row in rows] == [picture(2), picture(3), picture(3)]
    (first,) = place.glob("step_0_*.png")
    assert first.read_bytes() == picture(1)
    assert len(list(place.glob("*.png"))) == 4


def test_the_last_action_of_a_cut_episode_has_no_screenshot(exported) -> None:
    _, out, _ = exported
    place = out / "pyautogui/screenshot/sft-1_run2/os/a"
    rows = rows_of(place)
    assert rows[1]["screenshot_file"] is None
    assert (place / "result.txt").read_text() == "0.0\n"
    # A JPEG is written as the PNG of the same pixels.
    data = (place / rows[0]["screenshot_file"]).read_bytes()
    with Image.open(io.BytesIO(data)) as image, Image.open(io.BytesIO(picture(9, "JPEG"))) as seen:
        assert (image.format, image.tobytes()) == ("PNG", seen.tobytes())


def test_a_row_has_osworlds_fields(exported) -> None:
    _, out, _ = exported
    rows = rows_of(out / "pyautogui/screenshot/sft-1/os/a")
    keys = ["step_num", "action_timestamp", "action", "response", "reward", "done", "info", "screenshot_file"]
    assert [list(row) for row in rows] == [keys] * 3
    assert [(row["step_num"], row["action"], row["done"]) for row in rows] == [
        (1, "pyautogui.click(1, 2)", False),
        (2, None, False),
        (3, "DONE", True),
    ]
    assert rows[2]["info"]["done"] is True
    assert rows[0]["response"].startswith("Action: pyautogui.click")
    # Begun at 1,700,000,000, half a second of reset, 0.75 s a step.
    assert rows[0]["action_timestamp"] == "20231114@221321250000"
    assert rows[2]["screenshot_file"] == "step_3_20231114@221322750000.png"


def test_the_arguments_name_the_checkpoint(exported) -> None:
    _, out, _ = exported
    reported = json.loads((out / "pyautogui/screenshot/sft-1_run2/args.json").read_text())
    assert (reported["model"], reported["checkpoint_id"], reported["run"]) == ("sft-1_run2", "sft-1", 2)
    assert (reported["recipe_digest"], reported["max_steps"]) == ("recipe-of-sft-1", 5)


def test_an_episode_without_a_result_is_named_with_its_reason(exported) -> None:
    _, out, _ = exported
    lines = (out / "LEFT_OUT.md").read_text().splitlines()
    assert lines[-1] == "| sft-1 | chrome | b | 3 | env_fault | the desktop died |"
    assert sum(line.startswith("| sft") for line in lines) == 1


def test_each_evaluation_of_a_checkpoint_is_its_own_model_and_each_seed_is_in_one_of_them(tmp_path: Path) -> None:
    state = StateDir(tmp_path / "var")
    store = TrajectoryStore(state)
    done = (step(store, 0, 1, "DONE"),)
    played = [("one", "a", 0), ("one", "a", 7), ("one", "b", 7), ("two", "a", 0)]
    store.write_episodes(
        "a",
        [
            episode(f"{key}-{task}-{seed}", task, Outcome.SUCCESS, done, seed=seed, stage_key=f"eval-sft-1-{key}")
            for key, task, seed in played
        ],
    )
    export_osworld_results(state, tmp_path / "out")
    places = {str(path.parent.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("result.txt")}
    # Task b has no episode with the first seed, so it is not among the first seed's results.
    assert places == {
        "pyautogui/screenshot/sft-1_one/unknown/a",
        "pyautogui/screenshot/sft-1_one_run2/unknown/a",
        "pyautogui/screenshot/sft-1_one_run2/unknown/b",
        "pyautogui/screenshot/sft-1_two/unknown/a",
    }
    reported = json.loads((tmp_path / "out/pyautogui/screenshot/sft-1_one_run2/args.json").read_text())
    assert (reported["seed"], reported["stage_key"]) == (7, "eval-sft-1-one")


def test_checkpoints_can_be_chosen(exported, tmp_path: Path) -> None:
    state, _, _ = exported
    done = export_osworld_results(state, tmp_path / "out", selection=Selection(checkpoints=("gspo-1",)))
    assert (done.num_episodes, done.models) == (1, ("gspo-1",))


def test_a_policy_with_a_tree_has_its_own_observation_type_and_odd_ids_stay_in_the_folder(tmp_path: Path) -> None:
    state = StateDir(tmp_path / "var")
    store = TrajectoryStore(state)
    write_table(state, "union_tasks", [task_row("../../evil", domain="..")])
    seen = step(store, 0, 1, "WAIT", observation_text="[Task]\nx\n[Accessibility Tree]\nbutton")
    store.write_episodes("a", [episode("e", "../../evil", Outcome.FAILURE, (seen,))])
    export_osworld_results(state, tmp_path / "out")
    (place,) = [path.parent for path in (tmp_path / "out").rglob("result.txt")]
    assert str(place.relative_to(tmp_path / "out")) == "pyautogui/screenshot_a11y_tree/sft-1/_../_.._.._evil"


def test_our_importer_reads_back_what_was_written(exported, tmp_path: Path) -> None:
    _, out, _ = exported
    other = StateDir(tmp_path / "other")
    options = ImportOptions(name="back", licence="mit")
    summary = import_osworld_results(other, out, options)
    assert summary.num_episodes == 4
    store = TrajectoryStore(other)
    found = {
        (episode.engine, episode.task_id): episode
        for part in store.existing_parts("episodes")
        for episode in store.read_episodes(part)
    }
    outcomes: Mapping[Any, Any] = {key: str(episode.outcome) for key, episode in found.items()}
    assert outcomes == {
        ("sft-1", "a"): "success",
        ("sft-1_run2", "a"): "truncated",
        ("sft-1", "b"): "env_fault",
        ("gspo-1", "a"): "success",
    }
    success = found["sft-1", "a"]
    assert [store.read_blob(step.screenshot_sha256) for step in success.steps] == [picture(1), picture(2), picture(3)]
    assert [step.command for step in success.steps] == ["pyautogui.click(1, 2)", "", "DONE"]
    assert success.reward is not None
    assert success.reward.task == 1.0
    assert found["sft-1", "b"].reward is None
