"""Both denominators of a score, against values computed by hand. Settings are never mixed."""

import math

import pytest
from eval_samples import eval_row, eval_rows

from osworld_pipeline.domain.episode import Outcome, Parity
from osworld_pipeline.evaluation.intervals import IntervalMethod, wilson_interval
from osworld_pipeline.evaluation.scores import rates_by_seed, score_checkpoints, successes_by_task, summarise


def test_faults_are_outside_the_lenient_denominator_and_unsolved_in_the_strict_one() -> None:
    score = summarise(eval_rows(["s", "f", "t", "e", "g", "s"]), num_planned=10)
    assert (score.lenient.successes, score.lenient.n, score.lenient.value) == (2, 4, 0.5)
    assert (score.strict.successes, score.strict.n, score.strict.value) == (2, 6, 2 / 6)
    assert score.outcomes == {"env_fault": 1, "failure": 1, "grader_fault": 1, "success": 2, "truncated": 1}
    assert score.faults == {"env_fault": 1, "grader_fault": 1}
    assert (score.num_faults, score.num_missing) == (2, 4)


def test_a_touched_episode_counts_as_a_fault_with_a_reason_of_its_own() -> None:
    score = summarise(eval_rows(["s", "f", "p"]))
    assert (score.lenient.value, score.strict.value) == (1 / 2, 1 / 3)
    assert score.faults == {"touched": 1}


def test_a_planned_episode_that_never_ran_is_in_neither_denominator() -> None:
    score = summarise(eval_rows(["s", "f"]), num_planned=100)
    assert (score.lenient.n, score.strict.n, score.num_missing) == (2, 2, 98)
    assert summarise(eval_rows(["s"])).num_missing is None


def test_more_episodes_than_were_planned_are_refused() -> None:
    with pytest.raises(ValueError, match="has 2 episodes, and 1 were planned"):
        summarise(eval_rows(["sf"]), num_planned=1)


def test_rows_of_two_evaluations_are_refused_as_one_score_and_scored_separately() -> None:
    rows = [*eval_rows(["s"], key="one"), *eval_rows(["f"], key="two")]
    with pytest.raises(ValueError, match="one evaluation, not of 2: eval-c-one, eval-c-two"):
        summarise(rows)
    assert [(score.stage_key, score.success_rate) for score in score_checkpoints(rows)] == [
        ("eval-c-one", 1.0),
        ("eval-c-two", 0.0),
    ]


def test_a_faulted_second_seed_leaves_the_first_ones_independent() -> None:
    # In the strict denominator task a has two samples.
    score = summarise(eval_rows(["se", "f"]))
    assert score.lenient.interval.method is IntervalMethod.WILSON
    assert (score.low, score.high) == wilson_interval(1, 2)
    assert score.strict.interval.method is IntervalMethod.BOOTSTRAP


def test_rewards_between_0_and_1_have_a_mean_of_their_own() -> None:
    rows = [
        eval_row(Outcome.SUCCESS, reward=0.5),
        eval_row(Outcome.FAILURE, reward=0.25, seed=1),
        eval_row(Outcome.ENV_FAULT),
    ]
    score = summarise(rows)
    assert (score.success_rate, score.mean_reward) == (0.5, 0.375)
    assert math.isnan(summarise(rows[2:]).mean_reward)


def test_samples_come_by_task_in_the_order_of_the_seeds() -> None:
    rows = eval_rows(["sfe", "eo"])
    assert successes_by_task(reversed(rows)) == {"a": [True, False]}
    assert successes_by_task(rows, strict=True) == {"a": [True, False, False], "b": [False, False]}


def test_the_evaluation_key_is_the_part_after_the_checkpoint() -> None:
    row = eval_row(Outcome.SUCCESS, checkpoint_id="sft-1", stage_key="eval-sft-1-abc")
    assert row.evaluation_key == "abc"
    assert eval_row(Outcome.SUCCESS, stage_key="something-else").evaluation_key == ""


def test_rates_by_seed_are_over_the_tasks_that_every_seed_ended_validly() -> None:
    # Seeds 0, 1, 2 of tasks a, b, c; the fault of b takes b out of all three.
    assert rates_by_seed(eval_rows(["sff", "sse", "ssf"])) == [1.0, 0.5, 0.0]


def test_without_a_task_that_every_seed_ended_validly_there_are_no_rates() -> None:
    assert rates_by_seed(eval_rows(["se", "es"])) == []
    assert rates_by_seed([]) == []


def test_the_probes_of_an_evaluation_count_once_each_however_many_episodes_followed() -> None:
    first = {"parity_num_tokens": 56, "parity_mean_diff": 1e-6, "parity_max_diff": 5e-6}
    resumed = {"parity_num_tokens": 112, "parity_mean_diff": 4e-6, "parity_max_diff": 7e-6}
    rows = [*eval_rows({"a": "sss"}, **first), *eval_rows({"b": "s"}, **resumed), *eval_rows({"c": "e"})]
    parity = summarise(rows).parity
    assert parity is not None
    assert (parity.num_tokens, parity.max_diff) == (168, 7e-6)
    assert parity.mean_diff == pytest.approx(3e-6)
    assert summarise(eval_rows({"a": "s"}, **first)).parity == Parity(num_tokens=56, mean_diff=1e-6, max_diff=5e-6)
    assert summarise(eval_rows({"a": "s"})).parity is None
