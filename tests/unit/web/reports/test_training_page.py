"""The page of a training run: what it shows of episodes, groups, injections and the trainer, and that it loads nothing
else."""

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from episode_samples import make_episode, make_step
from page_reader import read_page

from osworld_pipeline.domain.checkpoint import Checkpoint, Stage
from osworld_pipeline.domain.episode import EpisodePurpose, Outcome, Reward
from osworld_pipeline.domain.group import GroupStatus, RolloutGroup
from osworld_pipeline.domain.replay import Injection
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.evaluation.scores import read_evals
from osworld_pipeline.evaluation.training_record import (
    MetricPoint,
    TrainingRecord,
    read_training,
    stage_of,
    stages_at_work,
)
from osworld_pipeline.store import TrajectoryStore
from osworld_pipeline.tables.checkpoints import upsert_checkpoint
from osworld_pipeline.web.charts.metrics import REPORTED_METRICS
from osworld_pipeline.web.charts.training import training_sections
from osworld_pipeline.web.evaluation_names import EvaluationName
from osworld_pipeline.web.reports.training_page import task_halves, write_training_page

KEY = "gspo_phase1-0123456789ab"
EVIL = '<script>alert("x")</script>'
OUTCOMES = ("sf", "ss", "fe", "ff")
"""Of the two episodes of each update's group."""
LETTERS = {"s": Outcome.SUCCESS, "f": Outcome.FAILURE, "e": Outcome.ENV_FAULT}


def checkpoint(name: str, num_updates: int, *, parent: str | None = "sft-1", **changes) -> Checkpoint:
    fields = {
        "checkpoint_id": name, "stage": Stage.GSPO_PHASE1, "parent_id": parent, "path": name,
        "num_updates": num_updates, "recipe_digest": "r" * 8,
        "data_digest": "d" * 8, "weights_digest": "w" * 8, "code_version": "abc123",
        "is_code_dirty": True, "recipe": {"name": "demo", "gspo": {"phase1": {"num_updates": 9}}},
        "metrics": {"loss": 1.0 / num_updates},
    }  # fmt: skip
    return Checkpoint(**(fields | changes))


def play(state: StateDir, *, error: str = "gone") -> None:
    """Four updates of one group of two episodes each; a milestone that was evaluated."""
    store = TrajectoryStore(state)
    episodes, groups = [], []
    for update, letters in enumerate(OUTCOMES):
        mine = [
            make_episode(
                f"{KEY}-{update}-{sample}", purpose=EpisodePurpose.TRAIN, stage_key=KEY, update=update,
                group_id=f"g{update}", task_id=f"t-{update % 2}", outcome=LETTERS[letter],
                reward=None if letter == "e" else Reward(
                    task=float(letter == "s"), partial=0.5, penalty=0.1, shaped=0.25, parts={"efficiency": 0.5}
                ),
                error=error if letter == "e" else None, steps=(make_step(0), make_step(1)), started_at=1e9 + update,
                times_s={"reset": 0.5, "model": 1.0, "step": 2.0, "evaluate": 0.1, "total": 3.6},
            )
            for sample, letter in enumerate(letters)
        ]  # fmt: skip
        status = GroupStatus.TRAINED if letters == "sf" else GroupStatus.ZERO_VARIANCE
        groups.append(
            RolloutGroup(
                group_id=f"g{update}", task_id=f"t-{update % 2}", stage_key=KEY, update=update, episodes=tuple(mine),
                status=status, reason="" if status is GroupStatus.TRAINED else f"all alike {error}",
            )
        )  # fmt: skip
        episodes += mine
    store.write_episodes("train", episodes)
    injection = Injection(
        injection_id="i", group_id="g3", row_id="r", task_id="t-1", source_dataset="recorded", reward=1.0,
        advantage=1.5, weight=1.0,
    )  # fmt: skip
    store.write_groups("train", groups, [injection])
    name = f"{KEY}-u0002"
    upsert_checkpoint(state, checkpoint(name, 2))
    evaluated = make_episode("e", checkpoint_id=name, stage_key=f"eval-{name}-0123456789ab")
    store.write_episodes("eval", [evaluated])


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> StateDir:
    state = StateDir(tmp_path_factory.mktemp("state"))
    play(state, error=EVIL)
    return state


@pytest.fixture(scope="module")
def record(state: StateDir) -> TrainingRecord:
    return read_training(state, KEY, checkpoints=[checkpoint(f"{KEY}-u0002", 2)], evals=read_evals(state))


def rows(record: TrainingRecord, title: str) -> tuple[tuple[str, ...], ...]:
    (found,) = [chart for section in training_sections(record) for chart in section.charts if chart.title == title]
    return found.rows


def test_a_record_holds_what_the_stage_rolled_out(record: TrainingRecord) -> None:
    assert [episode.update for episode in record.episodes] == [1, 1, 2, 2, 3, 3, 4, 4]
    assert [group.status for group in record.groups] == ["trained", *["zero_variance"] * 3]
    assert [(one.update, one.source_dataset) for one in record.injections] == [(4, "recorded")]
    assert (record.episodes[0].response_tokens, record.episodes[0].unparsed) == (40, 0)
    assert record.ancestors == ("sft-1",)
    assert (record.num_planned, record.is_whole) == (9, False)


def test_success_counts_valid_episodes_and_outcomes_count_all_episodes(record: TrainingRecord) -> None:
    assert [row[:2] for row in rows(record, "Success in training")] == [
        ("1", "50.0%"), ("2", "100.0%"), ("3", "0.0%"), ("4", "0.0%"),
    ]  # fmt: skip
    assert rows(record, "Outcomes")[2] == ("3", "0.0%", "50.0%", "50.0%"), "success, failure, env fault"


def test_raw_and_shaped_reward_have_separate_plots(record: TrainingRecord) -> None:
    assert [row[1] for row in rows(record, "Raw task reward")] == ["0.5", "1", "0", "0"]
    assert rows(record, "Shaped reward")[0] == ("1", "0.25", "0.5", "0.1")
    assert rows(record, "Terms of the shaped reward, before weights")[0] == ("1", "0.5")


def test_fates_injections_lengths_and_times_each_have_a_plot(record: TrainingRecord) -> None:
    assert rows(record, "Groups, trained and dropped")[1] == ("2", "0", "1")
    assert [row[1] for row in rows(record, "Replay rows injected")] == ["0", "0", "0", "1"]
    assert rows(record, "Turns of an episode")[0] == ("1", "2", "2", "2")
    assert rows(record, "Response tokens of a turn")[0] == ("1", "20", "20", "20")
    assert rows(record, "Where an episode's time went")[0] == ("1", "0.5", "1", "2", "0.1")


def test_milestones_are_shown_where_they_were_evaluated(record: TrainingRecord) -> None:
    assert rows(record, "Success on evaluated tasks")[0][:2] == ("2", "100.0%")


def test_evaluations_of_a_stage_are_named_by_suite_and_settings(state: StateDir, record: TrainingRecord) -> None:
    name = EvaluationName(key="", suite="mine", origin="", settings="seed 3 · T 0.6", began_at=None)
    first = record.evals[0]
    other = replace(first, stage_key=f"eval-{first.checkpoint_id}-0a", seed=1)
    keys = {first.evaluation_key: name, "0a": replace(name, suite="heldout")}
    (one,) = training_sections(record, names=keys)[0].charts
    (both,) = training_sections(replace(record, evals=(*record.evals, other)), names=keys)[0].charts
    assert (one.note, one.legend) == ("mine · seed 3 · T 0.6", ())
    assert [words for _, words in both.legend] == ["mine · seed 3 · T 0.6", "heldout · seed 3 · T 0.6"]
    text = read_page(write_training_page(state, record)).text
    assert "Evaluated suites" in text
    assert "Held-out tasks" not in text, "a suite of the user's is none"


def test_the_metrics_of_a_milestone_are_shown_where_mlflow_has_none(state: StateDir, record: TrainingRecord) -> None:
    assert rows(record, "Loss") == (("2", "0.5"),)
    reported = [MetricPoint(stage="gspo_phase1", update=update, name="loss", value=float(update)) for update in (1, 2)]
    other = read_training(state, KEY, checkpoints=[checkpoint(f"{KEY}-u0002", 2)], metrics=reported)
    assert rows(other, "Loss") == (("1", "1"), ("2", "2"))


def test_every_metric_of_the_trainer_has_a_chart_with_a_labelled_axis() -> None:
    points = tuple(MetricPoint(stage="gspo_phase1", update=1, name=one.name, value=0.5) for one in REPORTED_METRICS)
    record = TrainingRecord(stage_key=KEY, stage="gspo_phase1", checkpoint=None, ancestors=(), metrics=points)
    charts = [chart for section in training_sections(record) for chart in section.charts]
    named = {name for chart in charts for name in (*chart.columns[1:], chart.title.lower())}
    missing = [metric.name for metric in REPORTED_METRICS if not {metric.line, metric.words.lower()} & named]
    assert set(missing) <= {"replay_coverage", "replay_verified_coverage"}, "these stand beside the rollouts"
    assert all(re.search(r'class="label"[^>]*>[^<]+<', chart.svg) for chart in charts)


def test_tasks_are_compared_between_the_halves_of_a_training(record: TrainingRecord) -> None:
    halves = {one.task_id: one for one in task_halves(record)}
    first, second = halves["t-0"], halves["t-1"]
    assert (first.first_successes, first.first_n, first.second_n, first.num_faults) == (1, 2, 1, 1)
    assert first.change == -0.5
    assert (second.first_n, second.second_n, second.change, second.num_injections) == (2, 2, -1.0, 1)
    assert not math.isnan(second.change)


def test_the_page_shows_the_whole_record_and_runs_nothing(state: StateDir, record: TrainingRecord) -> None:
    page = read_page(write_training_page(state, record))
    for reported in (
        "It has not ended: 4 of 9 updates were begun; the last milestone has 2. 8 episodes of 2 tasks:",
        "3 of 7 valid ones succeeded, and 1 ended in a fault",
        "abc123 with changes", "all alike", "zero variance", "env fault", "screenshot missing", "sft-1",
    ):  # fmt: skip
        assert reported in page.text, reported
    assert EVIL in page.text
    assert not {"script", "link", "iframe", "object"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name.startswith("on") or name in ("src", "href")]


def test_every_plot_says_what_it_shows_and_has_its_numbers(state: StateDir, record: TrainingRecord) -> None:
    page = read_page(write_training_page(state, record))
    num_charts = sum(len(section.charts) for section in training_sections(record))
    assert num_charts >= 12
    assert page.tags.count("figure") - page.tags.count("img") >= num_charts
    labels = [value or "" for name, value in page.attributes if name == "aria-label"]
    assert sum(1 for name, value in page.attributes if (name, value) == ("role", "img")) == num_charts
    assert all(labels)
    assert page.text.count("Numbers") == num_charts


def test_a_stage_that_left_no_checkpoint_has_a_page_too(state: StateDir) -> None:
    record = read_training(state, KEY, checkpoints=[])
    page = read_page(write_training_page(state, record))
    assert record.stage == "gspo_phase1"
    assert "It has not ended and has no milestone; it began 4 updates." in page.text


def test_the_page_of_a_stage_without_data_says_so(tmp_path: Path) -> None:
    folder = StateDir(tmp_path)
    record = read_training(folder, "sft-0123456789ab", checkpoints=[])
    assert "This stage has no data to draw" in read_page(write_training_page(folder, record)).text


def test_stages_at_work_are_those_with_rollouts(state: StateDir) -> None:
    assert stages_at_work(state) == [KEY]
    assert (stage_of(KEY), stage_of("flywheel-00aa")) == ("gspo_phase1", "flywheel")
