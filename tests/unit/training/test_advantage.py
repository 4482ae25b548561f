import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from osworld_pipeline.domain.episode import Episode, EpisodePurpose, Outcome, Reward, SamplingParams
from osworld_pipeline.domain.group import RolloutGroup
from osworld_pipeline.domain.replay import ReplayRow
from osworld_pipeline.training.objective.advantage import (
    Estimator,
    SignalRule,
    compute_advantages,
    group_advantages,
    no_signal_reason,
)


def episode(number: int, outcome: Outcome, shaped: float | None) -> Episode:
    return Episode(
        episode_id=f"e{number}",
        task_id="task",
        task_digest="d",
        purpose=EpisodePurpose.TRAIN,
        checkpoint_id="sft-1",
        engine="fake",
        sampling=SamplingParams(temperature=0.8),
        outcome=outcome,
        reward=None if shaped is None else Reward(task=0.0, shaped=shaped),
    )


def group(episodes: list[Episode], replay_reward: float | None = None) -> RolloutGroup:
    replay = None
    if replay_reward is not None:
        replay = ReplayRow(
            row_id="r",
            task_id="task",
            original_task_id="task",
            source_dataset="sft_clean",
            reward=replay_reward,
            messages=(),
            image_sha256s=(),
        )
    return RolloutGroup(group_id="g", task_id="task", stage_key="s", update=0, episodes=tuple(episodes), replay=replay)


def test_advantages_of_one_success_among_four_match_hand_worked_numbers():
    # mean 1/4; deviations 3/4 and three times -1/4; variance (9 + 3)/16/3 = 1/4; std 1/2.
    assert compute_advantages([1.0, 0.0, 0.0, 0.0]) == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)


def test_advantages_of_two_rewards_match_hand_worked_numbers():
    # mean 0.5, deviations +-0.5, std sqrt(0.5) = 0.7071.
    assert compute_advantages([1.0, 0.0]) == pytest.approx([0.70710678, -0.70710678], abs=1e-5)


@pytest.mark.parametrize("reward", [0.0, 0.3, 1.0])
def test_group_with_equal_rewards_gives_zero_advantage(reward: float):
    assert compute_advantages([reward] * 4) == (0.0,) * 4


def test_rewards_that_differ_by_rounding_alone_give_zero_advantage():
    assert compute_advantages([0.3, 0.1 + 0.2, 0.3]) == (0.0, 0.0, 0.0)


def test_a_group_of_one_or_none_has_no_signal():
    assert compute_advantages([1.0]) == (0.0,)
    assert compute_advantages([]) == ()


@given(st.lists(st.floats(0, 1), min_size=2, max_size=8))
def test_advantages_sum_to_zero_and_keep_the_order_of_rewards(rewards: list[float]):
    advantages = compute_advantages(rewards)
    assert math.fsum(advantages) == pytest.approx(0.0, abs=1e-6)
    order = sorted(range(len(rewards)), key=lambda index: rewards[index])
    assert [advantages[index] for index in order] == sorted(advantages)


def test_faults_and_timeouts_are_not_samples():
    episodes = [
        episode(0, Outcome.SUCCESS, 1.0),
        episode(1, Outcome.ENV_FAULT, None),
        episode(2, Outcome.FAILURE, 0.0),
        episode(3, Outcome.TIMEOUT, None),
    ]
    assert group_advantages(group(episodes)).episodes == pytest.approx([0.70710678, -0.70710678], abs=1e-5)


def test_replay_joins_a_failed_group_as_one_more_sample():
    result = group_advantages(group([episode(0, Outcome.FAILURE, 0.0), episode(1, Outcome.FAILURE, 0.0)], 1.0))
    # mean 1/3; deviations -1/3, -1/3, 2/3; variance (1 + 1 + 4)/9/2 = 1/3; std 0.57735.
    assert result.episodes == pytest.approx([-0.57735, -0.57735], abs=1e-5)
    assert result.replay == pytest.approx(1.1547, abs=1e-4)
    assert not result.is_zero


def test_a_failed_group_without_replay_has_no_signal():
    result = group_advantages(group([episode(0, Outcome.FAILURE, 0.1), episode(1, Outcome.FAILURE, 0.1)]))
    assert result.is_zero
    assert result.replay is None


def test_a_valid_episode_without_a_reward_is_refused():
    with pytest.raises(ValueError, match="e0 ended in failure and has no reward"):
        group_advantages(group([episode(0, Outcome.FAILURE, None)]))


# Rewards 1, 0, 0, 0: mean 1/4, deviations 3/4 and -1/4, std 1/2. Leaving one out: 1 - 0, and 0 - 1/3 for the others.
@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("mean_std", [1.5, -0.5, -0.5, -0.5]),
        ("mean", [0.75, -0.25, -0.25, -0.25]),
        ("leave_one_out", [1.0, -1 / 3, -1 / 3, -1 / 3]),
    ],
)
def test_each_estimator_matches_hand_worked_numbers(estimator: Estimator, expected: list[float]):
    assert compute_advantages([1.0, 0.0, 0.0, 0.0], estimator) == pytest.approx(expected, abs=1e-5)


@given(st.lists(st.floats(0, 1), min_size=2, max_size=8))
def test_leave_one_out_is_each_reward_minus_the_mean_of_the_others(rewards: list[float]):
    advantages = compute_advantages(rewards, "leave_one_out")
    for index, advantage in enumerate(advantages):
        others = rewards[:index] + rewards[index + 1 :]
        assert advantage == pytest.approx(rewards[index] - math.fsum(others) / len(others), abs=3e-6)


@pytest.mark.parametrize("estimator", ["mean_std", "mean", "leave_one_out"])
@given(reward=st.floats(0, 1), noise=st.lists(st.floats(0, 1e-7), min_size=2, max_size=8))
def test_no_estimator_turns_noise_into_a_signal(estimator: Estimator, reward: float, noise: list[float]):
    assert compute_advantages([reward + one for one in noise], estimator) == (0.0,) * len(noise)


@pytest.mark.parametrize(("estimator", "own", "replayed"), [("mean", -1 / 3, 2 / 3), ("leave_one_out", -0.5, 1.0)])
def test_replay_is_one_more_sample_for_every_estimator(estimator: Estimator, own: float, replayed: float):
    # Rewards 0, 0 and the row's 1: mean 1/3; the others' means are 1/2, 1/2 and 0.
    failed = [episode(0, Outcome.FAILURE, 0.0), episode(1, Outcome.FAILURE, 0.0)]
    result = group_advantages(group(failed, 1.0), estimator)
    assert result.episodes == pytest.approx([own, own])
    assert result.replay == pytest.approx(replayed)


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_is_refused(reward: float):
    with pytest.raises(ValueError, match="rewards must be finite"):
        compute_advantages([0.0, reward])


def graded(number: int, task: float, shaped: float) -> Episode:
    outcome = Outcome.SUCCESS if task >= 0.5 else Outcome.FAILURE
    return replace(episode(number, outcome, shaped), reward=Reward(task=task, shaped=shaped))


def reason_of(rewards: Sequence[tuple[float, float]], rule: SignalRule, *, replay_reward: float | None = None) -> str:
    """`rewards`: the raw and the shaped reward of each episode."""
    of_group = group([graded(number, *both) for number, both in enumerate(rewards)], replay_reward)
    return no_signal_reason(of_group, group_advantages(of_group), rule)


@pytest.mark.parametrize("raw", [0.0, 0.4, 1.0])
def test_groups_with_equal_grader_rewards_have_no_task_signal_with_any_shaped_rewards(raw: float):
    rewards = [(raw, 0.101), (raw, 0.104), (raw + 1e-9, 0.9)]
    reason = reason_of(rewards, "task")
    assert reason.startswith(f'all 3 valid episodes have the raw task reward {raw:g} (rollout.signal = "task")')
    assert reason_of(rewards, "shaped") == ""


def test_partial_credit_is_a_signal():
    assert reason_of([(0.2, 0.3), (0.4, 0.5)], "task") == ""


@pytest.mark.parametrize("rule", ["task", "shaped"])
def test_a_replay_row_gives_a_group_of_failures_a_signal(rule: SignalRule):
    assert reason_of([(0.0, 0.1), (0.0, 0.1)], rule, replay_reward=1.0) == ""


@pytest.mark.parametrize("rule", ["task", "shaped"])
def test_equal_shaped_rewards_give_no_signal_under_either_rule(rule: SignalRule):
    reason = reason_of([(0.6, 1.0), (1.0, 1.0)], rule)
    assert reason.startswith(f'all 2 valid episodes have the same shaped reward (rollout.signal = "{rule}")')
