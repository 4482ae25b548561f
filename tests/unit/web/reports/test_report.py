"""Scores and the report: faults outside the denominator, model output as data, everything in one file."""

import base64
import io
import math
from pathlib import Path

import pytest
from episode_samples import make_episode, make_step
from eval_samples import eval_row
from page_reader import read_page
from PIL import Image

from osworld_pipeline.domain.checkpoint import Checkpoint, Stage
from osworld_pipeline.domain.episode import EpisodePurpose, Outcome, Parity, Reward
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.evaluation.scores import read_scores, summarise
from osworld_pipeline.evaluation.training_record import MetricPoint
from osworld_pipeline.store import TrajectoryStore
from osworld_pipeline.tables.checkpoints import upsert_checkpoint
from osworld_pipeline.web.reports.filmstrips import THUMBNAIL_WIDTH, thumbnail
from osworld_pipeline.web.reports.report import write_report

EVIL = '<script>alert("x")</script><img src=x onerror=alert(1)>'


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    return StateDir(tmp_path)


def test_a_score_counts_valid_episodes_and_shows_faults_by_kind() -> None:
    outcomes = [Outcome.SUCCESS, Outcome.FAILURE, Outcome.TRUNCATED, Outcome.FAILURE]
    faults = [Outcome.TIMEOUT, Outcome.GRADER_FAULT, Outcome.TIMEOUT]
    score = summarise([eval_row(outcome) for outcome in [*outcomes, *faults]])
    assert (score.n, score.successes, score.success_rate) == (4, 1, 0.25)
    assert score.faults == {"grader_fault": 1, "timeout": 2}
    assert score.num_faults == 3
    assert (score.mean_shaped_reward, score.mean_turns) == (0.5, 2.0)


def test_a_score_of_faults_only_is_unknown_and_not_zero() -> None:
    score = summarise([eval_row(Outcome.ENV_FAULT)])
    assert math.isnan(score.success_rate)
    assert (score.low, score.high) == (0.0, 1.0)


def test_a_score_over_several_checkpoints_is_refused() -> None:
    with pytest.raises(ValueError, match="one checkpoint, not of 2"):
        summarise([eval_row(Outcome.SUCCESS), eval_row(Outcome.SUCCESS, checkpoint_id="other")])


def play(state: StateDir, *, response: str = "Action: go") -> None:
    """Two checkpoints evaluated on two tasks, one fault, and some training."""
    store = TrajectoryStore(state)
    sink = io.BytesIO()
    Image.new("RGB", (512, 320), (40, 90, 160)).save(sink, "PNG")
    sha256 = store.write_blob(sink.getvalue(), suffix="png")
    for name, stage in (("p2", Stage.GSPO_PHASE2), ("base", Stage.BASE)):
        upsert_checkpoint(state, Checkpoint(
            checkpoint_id=name, stage=stage, parent_id=None, path=name, num_updates=0,
            recipe_digest="", data_digest="", weights_digest="",
        ))  # fmt: skip
        good = make_step(0, sha256=sha256, response_text=response)
        lost = make_step(1, sha256="0" * 64)
        store.write_episodes(f"eval-{name}", [
            make_episode(f"{name}-0", checkpoint_id=name, steps=(good, lost), grader_version="g-7",
                         image_digest="img-9", parity=Parity(num_tokens=56, mean_diff=2e-7, max_diff=1e-6)),
            make_episode(f"{name}-1", checkpoint_id=name, task_id="s-click-0001", outcome=Outcome.FAILURE,
                         reward=Reward(task=0.0), steps=(good,)),
            make_episode(f"{name}-2", checkpoint_id=name, task_id="s-click-0002", outcome=Outcome.ENV_FAULT,
                         reward=None, error=f"gone {response}", seed=3),
        ])  # fmt: skip
    for update in range(3):
        reward = Reward(task=update / 2, shaped=update / 4)
        episode = make_episode(f"t{update}", purpose=EpisodePurpose.TRAIN, stage_key="p2", update=update, reward=reward)
        store.write_episodes(f"train-{update}", [episode])


def test_scores_come_in_the_order_of_the_stages(state: StateDir) -> None:
    play(state)
    scores = read_scores(state)
    assert [(score.checkpoint_id, score.stage, score.successes, score.n, score.num_faults) for score in scores] == [
        ("base", "base", 1, 2, 1),
        ("p2", "gspo_phase2", 1, 2, 1),
    ]


def test_the_report_says_what_its_numbers_depend_on(state: StateDir) -> None:
    play(state)
    metrics = [MetricPoint(stage="gspo_phase2", update=update, name="kl", value=0.1 * update) for update in range(3)]
    path = write_report(state, metrics=metrics, suite_digest="suite-5", recipe_name="demo")
    text = read_page(path).text
    for expected in (
        "50.0%",
        "1 of 2",
        "9.5% to 90.5%",
        "suite-5",
        "img-9",
        "g-7",
        "0, 3",
        "demo",
        "env fault",
        "KL to the",
        "differ by 2e-07 on average, 1e-06 at most (56 tokens)",
    ):
        assert expected in text
    assert "Rollout task reward" in text
    assert "screenshot missing" in text


def test_the_report_loads_nothing_from_outside_its_file(state: StateDir) -> None:
    play(state)
    page = read_page(write_report(state))
    links = [value or "" for name, value in page.attributes if name in ("src", "href")]
    assert links
    assert all(link.startswith("data:image/jpeg;base64,") for link in links)
    assert not {"script", "link", "iframe"} & set(page.tags)


def test_model_output_is_shown_and_never_run(state: StateDir) -> None:
    play(state, response=EVIL)
    path = write_report(state, recipe_name=EVIL, suite_digest='" onload="alert(1)')
    page = read_page(path)
    assert "script" not in page.tags
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert EVIL in page.text


def test_a_report_before_any_evaluation_says_so(state: StateDir) -> None:
    assert "No checkpoint has been evaluated yet" in read_page(write_report(state)).text


def test_a_thumbnail_is_small_and_data_that_is_not_an_image_has_none() -> None:
    sink = io.BytesIO()
    Image.new("RGB", (1920, 1080)).save(sink, "PNG")
    data = base64.b64decode(thumbnail(sink.getvalue()).removeprefix("data:image/jpeg;base64,"))
    with Image.open(io.BytesIO(data)) as image:
        assert image.size == (THUMBNAIL_WIDTH, 169)
    assert thumbnail(b"no image") == ""
