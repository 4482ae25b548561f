"""Which reports are made from a state folder, and what prevents a report."""

import re
from pathlib import Path

import pytest
from checkpoint_samples import make_checkpoint, write_evaluation
from episode_samples import make_episode

from osworld_pipeline.domain.checkpoint import Checkpoint, Stage
from osworld_pipeline.domain.episode import EpisodePurpose
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import DatasetError, TableError
from osworld_pipeline.recipes import Recipe, load_recipe
from osworld_pipeline.runs.evaluate.plan import plan_evaluation
from osworld_pipeline.runs.evaluate.report import (
    find_stage,
    make_all_reports,
    make_report,
    make_suite_report,
    make_training_report,
    reported_checkpoints,
    training_stages,
)
from osworld_pipeline.store import TrajectoryStore
from osworld_pipeline.tables.checkpoints import upsert_checkpoint

RECIPE = load_recipe("smoke")
SFT, AT_WORK = "sft-0123456789ab", "gspo_phase1-00aa00aa00aa"


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> StateDir:
    """An SFT checkpoint with a milestone, evaluated on the recipe's held-out tasks, and a phase that still runs."""
    state = StateDir(tmp_path_factory.mktemp("state"))
    for name, num_updates in ((f"{SFT}-u0002", 2), (SFT, 4)):
        upsert_checkpoint(state, Checkpoint(
            checkpoint_id=name, stage=Stage.SFT, parent_id=None, path=name, num_updates=num_updates, recipe_digest="",
            data_digest="", weights_digest="",
        ))  # fmt: skip
    store = TrajectoryStore(state)
    for part, (task, plan) in plan_evaluation(RECIPE, SFT).episodes.items():
        episode = make_episode(plan.episode_id, task_id=task.task_id, checkpoint_id=SFT, stage_key=plan.stage_key)
        store.write_episodes(part, [episode])
    at_work = make_episode("t", purpose=EpisodePurpose.TRAIN, stage_key=AT_WORK, update=0, group_id="g")
    store.write_episodes("t", [at_work])
    return state


def uri_of(state: StateDir) -> str:
    return f"sqlite:///{state.mlflow_db}"


def test_training_stages_are_the_finished_and_the_running_ones(state: StateDir) -> None:
    assert training_stages(state) == [SFT, AT_WORK]


@pytest.mark.parametrize(
    ("named", "found"),
    [(SFT, SFT), (f"{SFT}-u0002", SFT), ("sft", SFT), (AT_WORK, AT_WORK), ("gspo_phase1", AT_WORK)],
)
def test_a_stage_is_named_by_a_checkpoint_itself_or_its_kind(state: StateDir, named: str, found: str) -> None:
    assert find_stage(state, named) == found


def test_an_unknown_training_run_is_an_error_that_names_the_known_ones(state: StateDir) -> None:
    with pytest.raises(TableError, match=rf"no training run 'gspo_phase2' .*; there are: {AT_WORK}, {SFT}"):
        find_stage(state, "gspo_phase2")


def test_a_suite_is_reported_as_the_recipe_evaluates_it(state: StateDir) -> None:
    path = make_suite_report(state, RECIPE, "heldout")
    assert path.name.startswith("suite-heldout-")
    assert SFT in path.read_text()
    with pytest.raises(
        TableError, match=r"run .*osworld-pipeline backfill --suites heldout --state .*, or name the recipe"
    ):
        make_suite_report(state, load_recipe("smoke", settings=["evaluation.max_turns=7"]), "heldout")
    with pytest.raises(DatasetError, match="no suite 'nobodys'"):
        make_suite_report(state, RECIPE, "nobodys")


def test_all_reports_are_written_and_the_index_names_them(state: StateDir) -> None:
    paths = make_all_reports(
        state, RECIPE, checkpoint_ids=[SFT], stage_keys=training_stages(state), tracking_uri=uri_of(state)
    )
    assert [path.name.partition("-")[0] for path in paths] == [
        "report.html",
        "suite",
        "training",
        "training",
        "index.html",
    ]
    index = paths[-1].read_text()
    assert all(path.name in index for path in paths[:-1])
    assert not state.mlflow_db.exists(), "a report makes no database"


def test_a_user_suite_that_cannot_be_read_leaves_out_only_its_own_page(state: StateDir, tmp_path: Path) -> None:
    state.suites.mkdir(exist_ok=True)
    bad = state.suites / "bad.json"
    bad.write_text("{")
    try:
        paths = make_all_reports(state, RECIPE, checkpoint_ids=[SFT], stage_keys=[], tracking_uri=uri_of(state))
    finally:
        bad.unlink()
    assert [path.name.partition("-")[0] for path in paths] == ["report.html", "suite", "index.html"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # MLflow's own warnings
def test_an_mlflow_that_does_not_answer_leaves_out_the_curves_and_is_reported(state: StateDir) -> None:
    reported: list[str] = []
    path = make_training_report(state, SFT, tracking_uri="http://127.0.0.1:1", say=reported.append)
    assert path.is_file()
    assert len(reported) == 1
    assert reported[0].startswith("curves are left out: cannot look up the run of sft-")


def test_only_checkpoints_evaluated_with_the_settings_of_the_recipe_are_reported(state: StateDir) -> None:
    assert reported_checkpoints(state, RECIPE, []) == [SFT]
    with pytest.raises(TableError, match="was evaluated on the held-out tasks of recipe smoke"):
        reported_checkpoints(state, RECIPE, [f"{SFT}-u0002"])


def test_a_report_shows_evaluations_under_other_settings_in_groups_of_their_own(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    with pytest.raises(
        TableError, match=r"no checkpoint of .* has been evaluated: run .*osworld-pipeline evaluate --state"
    ):
        reported_checkpoints(state, RECIPE, [])
    first, second = "sft-000000000001", "sft-000000000002"
    for name in (first, second):
        upsert_checkpoint(state, make_checkpoint(name))
    write_evaluation(state, RECIPE, first, num_successes=1)

    def headings(recipe: Recipe) -> list[str]:
        ids = reported_checkpoints(state, recipe, [])
        page = make_report(state, recipe, checkpoint_ids=ids, tracking_uri=uri_of(state)).read_text()
        assert first in page
        assert "No checkpoint has been evaluated" not in page
        return re.findall(r"<h2>(.*?)</h2>", page)

    other = load_recipe("smoke", settings=["evaluation.max_turns=2", "evaluation.temperature=0.5"])
    assert headings(RECIPE)[0] == "Success on held-out tasks"
    assert headings(other)[0].startswith("heldout · ")
    write_evaluation(state, other, second, num_successes=0)
    own, others = headings(other)[:2]
    assert own == "Success on held-out tasks"
    assert others.startswith("heldout · ")


def test_scores_of_another_grader_are_shown_separately(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    for number, grader in (("1", "1"), ("2", "8")):
        upsert_checkpoint(state, make_checkpoint(f"sft-00000000000{number}"))
        write_evaluation(state, RECIPE, f"sft-00000000000{number}", num_successes=1, grader_version=grader)
    page = make_suite_report(state, RECIPE, "heldout").read_text()
    assert "Not ranked together with these: other desktop image or grader" in page
