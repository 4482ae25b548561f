"""The ring buffer of steps: returns calculated by hand, capacity, balance, and filling it from the store."""

import threading
from collections import Counter
from pathlib import Path

import pytest
from replay_samples import rollout

from osworld_pipeline.domain.episode import Outcome
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import TableError
from osworld_pipeline.rollout.step_replay import ReplayStep, SampledStep, StepReplayBuffer
from osworld_pipeline.store import TrajectoryStore


def step(episode_id: str, index: int) -> ReplayStep:
    return ReplayStep(
        episode_id=episode_id,
        task_id="t",
        step_index=index,
        screenshot_sha256="a" * 64,
        observation_text="",
        response_text="",
        action=None,
    )


def add(buffer: StepReplayBuffer, episode_id: str, rewards: list[float]) -> None:
    for index, reward in enumerate(rewards):
        buffer.add_step(step(episode_id, index), reward=reward, is_last=index + 1 == len(rewards))


def everything(buffer: StepReplayBuffer) -> list[SampledStep]:
    sampled = buffer.sample(len(buffer))
    return sorted(sampled, key=lambda one: (one.step.episode_id, one.step.step_index))


def test_returns_are_discounted_from_the_end() -> None:
    buffer = StepReplayBuffer(reward_discount=0.5)
    add(buffer, "e", [1.0, 0.0, 4.0])
    # 4; 0 + 4/2; 1 + 2/2.
    assert [one.discounted_return for one in everything(buffer)] == [2.0, 2.0, 4.0]
    assert [one.is_last for one in everything(buffer)] == [False, False, True]


def test_without_a_discount_the_return_of_every_step_is_the_outcome() -> None:
    buffer = StepReplayBuffer()
    assert buffer.add_episode(rollout("e", 1.0, action_types=("click", "type", "key"))) == 3
    assert [one.discounted_return for one in everything(buffer)] == [1.0, 1.0, 1.0]


def test_outcome_only_keeps_the_last_step_with_its_own_reward() -> None:
    buffer = StepReplayBuffer(reward_discount=0.5, only_keep_outcome=True)
    add(buffer, "e", [1.0, 0.0, 4.0])
    (one,) = everything(buffer)
    assert (one.step.step_index, one.discounted_return, one.is_last) == (2, 4.0, True)


def test_steps_wait_until_their_episode_ends() -> None:
    buffer = StepReplayBuffer()
    buffer.add_step(step("e", 0), reward=0.0, is_last=False)
    buffer.add_step(step("lost", 0), reward=0.0, is_last=False)
    assert (len(buffer), buffer.sample(3)) == (0, [])
    buffer.discard("lost")
    buffer.add_step(step("e", 1), reward=1.0, is_last=True)
    buffer.add_step(step("lost", 0), reward=0.5, is_last=True)
    assert [(one.step.episode_id, one.step.step_index) for one in everything(buffer)] == [
        ("e", 0),
        ("e", 1),
        ("lost", 0),
    ]


def test_a_full_ring_drops_the_oldest_steps() -> None:
    buffer = StepReplayBuffer(capacity=3)
    add(buffer, "a", [0.0, 1.0])
    add(buffer, "b", [0.0, 1.0])
    assert [(one.step.episode_id, one.step.step_index) for one in everything(buffer)] == [("a", 1), ("b", 0), ("b", 1)]


@pytest.mark.parametrize("outcome", [outcome for outcome in Outcome if not outcome.is_valid])
def test_an_episode_with_a_fault_is_never_added(outcome: Outcome) -> None:
    buffer = StepReplayBuffer()
    assert buffer.add_episode(rollout("e", None, outcome=outcome)) == 0
    assert len(buffer) == 0


def test_samples_are_distinct_seeded_and_uniform() -> None:
    buffer, same = StepReplayBuffer(seed=3), StepReplayBuffer(seed=3)
    for ring in (buffer, same):
        add(ring, "e", [0.0] * 4 + [1.0])
    counts: Counter[int] = Counter()
    for _ in range(2000):
        drawn = buffer.sample(2)
        assert drawn == same.sample(2)
        assert len({one.step.step_index for one in drawn}) == 2
        counts.update(one.step.step_index for one in drawn)
    # 4,000 draws over five steps; 23.5 is exceeded once in ten thousand times.
    assert sum((counts[index] - 800) ** 2 / 800 for index in range(5)) < 23.5
    assert len(buffer.sample(99)) == 5


def test_a_balanced_sample_is_half_below_and_half_above_the_threshold() -> None:
    buffer = StepReplayBuffer(balance_threshold=0.5)
    add(buffer, "failed", [0.0] * 20)
    add(buffer, "won", [0.0, 0.0, 1.0])

    def num_above(count: int) -> int:
        drawn = buffer.sample(count, is_balanced=True)
        assert len({(one.step.episode_id, one.step.step_index) for one in drawn}) == len(drawn) == min(count, 23)
        return sum(one.discounted_return >= 0.5 for one in drawn)

    assert [num_above(count) for count in (4, 5, 6, 10, 99)] == [2, 3, 3, 3, 3]


def test_statistics_count_both_sides_of_the_threshold_and_steps_by_episode() -> None:
    buffer = StepReplayBuffer(balance_threshold=0.1)
    assert buffer.stats.outcome_mean is None
    add(buffer, "a", [0.0, 1.0])
    add(buffer, "b", [0.0, 0.0])
    add(buffer, "c", [0.1])
    stats = buffer.stats
    assert (stats.num_steps, stats.num_episodes, stats.num_below, stats.num_above) == (5, 3, 2, 3)
    assert stats.outcome_mean == pytest.approx(1.1 / 3)
    assert stats.episodes_by_num_steps == {1: 1, 2: 2}
    buffer.clear()
    assert buffer.stats.num_steps == 0


def test_the_ring_is_filled_from_the_store_by_a_condition(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    TrajectoryStore(state).write_episodes(
        "p",
        [
            rollout("won", 1.0, action_types=("click", "type"), started_at=1.0),
            rollout("failed", 0.0, task_id="u", started_at=2.0),
            rollout("fault", None),
        ],
    )
    buffer = StepReplayBuffer.from_store(state, reward_discount=0.9)
    assert [(one.step.episode_id, one.discounted_return, one.is_last) for one in everything(buffer)] == [
        ("failed", 0.0, True),
        ("won", 0.9, False),
        ("won", 1.0, True),
    ]
    filled = StepReplayBuffer()
    filled.add_episode(rollout("won", 1.0, action_types=("click", "type")))
    only = StepReplayBuffer.from_store(state, "e.is_success")
    assert everything(only) == everything(filled), "the same steps, whether from memory or from the store"
    assert {one.step.episode_id for one in everything(StepReplayBuffer.from_store(state, capacity=1))} == {"failed"}


def test_a_condition_that_is_not_valid_sql_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(TableError, match="cannot fill the step buffer where no_such_column = 1"):
        StepReplayBuffer.from_store(StateDir(tmp_path), "no_such_column = 1")


@pytest.mark.parametrize("bad", [{"capacity": 0}, {"reward_discount": 1.5}, {"reward_discount": -0.1}])
def test_invalid_settings_are_refused(bad: dict) -> None:
    with pytest.raises(ValueError, match="invalid capacity"):
        StepReplayBuffer(**bad)


def test_threads_may_add_and_sample_at_once() -> None:
    buffer = StepReplayBuffer(capacity=500)
    errors: list[BaseException] = []

    def work(name: str) -> None:
        try:
            for index in range(60):
                add(buffer, f"{name}-{index}", [0.0, 1.0])
                assert len(buffer.sample(4)) <= 4
                assert buffer.stats.num_steps <= 500
        except BaseException as error:  # noqa: BLE001 - reported by the test's own thread
            errors.append(error)

    threads = [threading.Thread(target=work, args=(f"w{number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert errors == []
    assert len(buffer) == 480
