"""OSGym's ReplayBuffer: returns, the ring, balance, and episodes that never end."""

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from osworld_pipeline.integrations.osgym.replay_buffer import MAX_OPEN_EPISODES, Item, ReplayBuffer


def step(uid: str, reward: float, *, done: bool = False, **more: Any) -> Item:
    return 0, {"reward": reward, "done": done, **more}, {"uid": uid}


def add_episode(buffer: ReplayBuffer, uid: str, *rewards: float) -> None:
    for index, reward in enumerate(rewards):
        buffer.add(step(uid, reward, done=index == len(rewards) - 1, index=index))


def returns(buffer: ReplayBuffer) -> list[float]:
    return [env_ret["reward"] for _, env_ret, _ in buffer.items]


def test_returns_are_discounted_from_the_end() -> None:
    buffer = ReplayBuffer(gamma=0.9)
    add_episode(buffer, "a", 0.5, 0.0, 1.0)
    assert returns(buffer) == pytest.approx([0.5 + 0.9 * 0.9, 0.9, 1.0])


def test_without_a_discount_the_return_of_every_step_is_the_outcome() -> None:
    buffer = ReplayBuffer()
    add_episode(buffer, "a", 0.0, 0.0, 1.0)
    assert returns(buffer) == [1.0, 1.0, 1.0]


def test_a_buffer_of_only_outcomes_keeps_the_last_step_unchanged() -> None:
    buffer = ReplayBuffer(gamma=0.5, only_keep_outcome=True)
    add_episode(buffer, "a", 0.25, 0.0, 1.0)
    ((_, env_ret, _),) = buffer.items
    assert (env_ret["index"], env_ret["reward"]) == (2, 1.0)


def test_an_added_step_is_not_modified() -> None:
    buffer = ReplayBuffer()
    first = step("a", 0.0)
    buffer.add(first)
    buffer.add(step("a", 1.0, done=True))
    assert first[1]["reward"] == 0.0


def test_steps_of_an_unfinished_episode_are_not_sampled() -> None:
    buffer = ReplayBuffer()
    buffer.add(step("a", 1.0))
    assert (len(buffer), buffer.sample(3), buffer.num_open_episodes) == (0, [], 1)


def test_a_lost_episode_leaves_no_steps_in_the_buffer() -> None:
    """OSGym's client retries without a limit, and its buffer keeps episodes that never end."""
    buffer = ReplayBuffer()
    buffer.add(step("a", 0.0))
    buffer.drop("a")
    buffer.drop("a")
    add_episode(buffer, "a", 1.0)
    assert returns(buffer) == [1.0]
    assert buffer.num_open_episodes == 0


def test_open_episodes_are_bounded() -> None:
    buffer = ReplayBuffer()
    for number in range(MAX_OPEN_EPISODES + 5):
        buffer.add(step(str(number), 0.0))
    assert buffer.num_open_episodes == MAX_OPEN_EPISODES
    buffer.add(step("0", 1.0, done=True))
    assert len(buffer) == 1, "the oldest was forgotten"


def test_full_ring_drops_the_oldest_step() -> None:
    buffer = ReplayBuffer(capacity=3)
    for number in range(5):
        add_episode(buffer, str(number), float(number))
    assert returns(buffer) == [2.0, 3.0, 4.0]


def test_interleaved_episodes_are_kept_apart() -> None:
    buffer = ReplayBuffer()
    for uid, reward, done in (("a", 0.0, False), ("b", 0.0, False), ("a", 1.0, True), ("b", 0.5, True)):
        buffer.add(step(uid, reward, done=done))
    assert returns(buffer) == [1.0, 1.0, 0.5, 0.5]


def test_balanced_sample_has_as_many_low_returns_as_others() -> None:
    """OSGym counts the balance and never uses it."""
    buffer = ReplayBuffer(seed=1)
    for number in range(90):
        add_episode(buffer, f"low {number}", 0.0)
    for number in range(10):
        add_episode(buffer, f"high {number}", 1.0)
    assert buffer.get_balance_stats() == (90, 10)
    drawn = [env_ret["reward"] for _, env_ret, _ in buffer.sample(16)]
    assert (drawn.count(0.0), drawn.count(1.0)) == (8, 8)
    drawn = [env_ret["reward"] for _, env_ret, _ in buffer.sample(40)]
    assert (drawn.count(0.0), drawn.count(1.0)) == (30, 10)
    uniform = [env_ret["reward"] for _, env_ret, _ in buffer.sample(50, is_balanced=False)]
    assert uniform.count(1.0) <= 10 < uniform.count(0.0)


def test_return_at_the_threshold_is_not_low() -> None:
    buffer = ReplayBuffer(balance_thres=0.5)
    add_episode(buffer, "a", 0.5)
    add_episode(buffer, "b", math.nextafter(0.5, 0))
    assert buffer.get_balance_stats() == (1, 1)


def test_same_seed_draws_the_same() -> None:
    def drawn(seed: int) -> list[str]:
        buffer = ReplayBuffer(seed=seed)
        for number in range(50):
            add_episode(buffer, str(number), number % 2)
        return [meta_info["uid"] for _, _, meta_info in buffer.sample(10)]

    assert drawn(3) == drawn(3) != drawn(4)


@pytest.mark.parametrize("reward", [None, "1", True, math.nan, math.inf])
def test_step_without_a_finite_reward_is_refused(reward: Any) -> None:
    with pytest.raises(ValueError, match="not a finite number"):
        ReplayBuffer().add(step("a", reward))


def test_step_without_an_episode_is_refused() -> None:
    with pytest.raises(ValueError, match="uid"):
        ReplayBuffer().add((0, {"reward": 0.0}, {}))


def test_a_buffer_without_capacity_or_with_an_invalid_discount_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one step"):
        ReplayBuffer(0)
    with pytest.raises(ValueError, match="discount"):
        ReplayBuffer(gamma=1.5)


def test_cleared_buffer_is_empty() -> None:
    buffer = ReplayBuffer(capacity=2)
    add_episode(buffer, "a", 1.0, 1.0, 1.0)
    buffer.add(step("b", 0.0))
    buffer.clear()
    add_episode(buffer, "c", 0.25)
    assert (returns(buffer), buffer.num_open_episodes) == ([0.25], 0)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=6), max_size=12),
    st.integers(1, 20),
    st.integers(0, 30),
    st.booleans(),
)
def test_a_sample_holds_different_kept_steps(
    episodes: list[list[float]], capacity: int, wanted: int, is_balanced: bool
) -> None:
    buffer = ReplayBuffer(capacity, gamma=0.9)
    for number, rewards in enumerate(episodes):
        add_episode(buffer, str(number), *rewards)
    kept = {(meta["uid"], env_ret["index"]) for _, env_ret, meta in buffer.items}
    drawn = [(meta["uid"], env_ret["index"]) for _, env_ret, meta in buffer.sample(wanted, is_balanced=is_balanced)]
    assert len(buffer) == min(capacity, sum(map(len, episodes))) == len(kept)
    assert len(drawn) == len(set(drawn)) == min(wanted, len(buffer))
    assert set(drawn) <= kept
    assert sum(buffer.get_balance_stats()) == len(buffer)
