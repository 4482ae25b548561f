"""The replay buffer: found by id or chunk, injected only where a whole group failed, its origin kept."""

import random
from collections.abc import Callable

import pytest

from osworld_pipeline.agent.observation_text import assistant_message, system_message, user_message
from osworld_pipeline.agent.renderer import Renderer, render_demonstration
from osworld_pipeline.domain.digest import digest_bytes
from osworld_pipeline.domain.episode import Episode, EpisodePurpose, Outcome, Reward, SamplingParams
from osworld_pipeline.domain.group import RolloutGroup
from osworld_pipeline.domain.replay import ReplayRow, base_task_id
from osworld_pipeline.rollout.replay import ReplayBuffer
from osworld_pipeline.rollout.trajectories import episode_trajectory, replay_trajectory


def row(name: str, original_task_id: str) -> ReplayRow:
    return ReplayRow(
        row_id=name,
        task_id=base_task_id(original_task_id),
        original_task_id=original_task_id,
        source_dataset="sft_clean",
        reward=1.0,
        messages=(system_message("s"), user_message("u"), assistant_message("Action: a")),
        image_sha256s=(),
    )


def episode(reward: float | None, outcome: Outcome = Outcome.FAILURE) -> Episode:
    return Episode(
        episode_id="e",
        task_id="t",
        task_digest="d",
        purpose=EpisodePurpose.TRAIN,
        checkpoint_id="c",
        engine="fake",
        sampling=SamplingParams(temperature=1.0),
        outcome=outcome,
        reward=None if reward is None else Reward(task=reward, shaped=0.9),
    )


def group(*episodes: Episode, task_id: str = "t") -> RolloutGroup:
    return RolloutGroup(group_id="g", task_id=task_id, stage_key="s", update=0, episodes=episodes)


@pytest.mark.parametrize(
    ("task_id", "base"),
    [("t_chunk0", "t"), ("a_chunk1_chunk12", "a_chunk1"), ("t", "t"), ("_chunk3", "_chunk3"), ("t_chunkx", "t_chunkx")],
)
def test_the_base_id_stands_before_the_last_chunk(task_id: str, base: str) -> None:
    assert base_task_id(task_id) == base


def test_an_exact_id_is_found_before_chunks_of_its_base() -> None:
    buffer = ReplayBuffer([row("a", "t_chunk0"), row("b", "t_chunk1"), row("c", "t")])
    assert [found.row_id for found in buffer.find("t_chunk1")] == ["b"]
    assert [found.row_id for found in buffer.find("t")] == ["c"]
    assert [found.row_id for found in buffer.find("t_chunk9")] == ["a", "b", "c"]
    assert buffer.find("other") == ()


def test_at_most_so_many_rows_are_kept_for_a_task_and_none_twice() -> None:
    buffer = ReplayBuffer([row(name, "t") for name in "aab"], per_task=2)
    assert [found.row_id for found in buffer.find("t")] == ["a", "b"]
    assert not buffer.add(row("c", "t"))


def test_a_failed_group_gets_a_row_and_its_shaped_reward_does_not_matter() -> None:
    buffer = ReplayBuffer([row("a", "t")])
    injected = buffer.inject(group(episode(0.0), episode(0.49)), threshold=0.5, rng=random.Random(0))
    assert injected is not None
    assert injected.row_id == "a"


@pytest.mark.parametrize(
    "failed",
    [
        group(episode(0.0), episode(0.5, Outcome.SUCCESS)),
        group(episode(0.0), task_id="unknown"),
        group(episode(None, Outcome.ENV_FAULT)),
        group(),
    ],
)
def test_no_row_joins_a_group_that_succeeded_or_cannot_be_served_or_has_nothing_valid(failed: RolloutGroup) -> None:
    assert ReplayBuffer([row("a", "t")]).inject(failed, threshold=0.5, rng=random.Random(0)) is None


def test_a_fault_beside_failures_does_not_hinder_injection() -> None:
    mixed = group(episode(0.0), episode(None, Outcome.ENV_FAULT))
    assert ReplayBuffer([row("a", "t")]).inject(mixed, threshold=0.5, rng=random.Random(0)) is not None


def test_the_choice_depends_on_the_seed_alone() -> None:
    rows = [row(name, "t") for name in "abcdefgh"]

    def choices() -> list[str]:
        buffer, rng = ReplayBuffer(rows), random.Random(5)
        chosen = [buffer.inject(group(episode(0.0)), threshold=0.5, rng=rng) for _ in range(20)]
        return [picked.row_id for picked in chosen if picked]

    assert choices() == choices()
    assert len(set(choices())) > 1


def test_statistics_count_checks_injections_and_coverage() -> None:
    buffer = ReplayBuffer([row("a", "t")])
    assert buffer.stats.rate == 0.0
    buffer.inject(group(episode(0.0)), threshold=0.5, rng=random.Random(0))
    buffer.inject(group(episode(1.0, Outcome.SUCCESS)), threshold=0.5, rng=random.Random(0))
    assert (buffer.stats.num_checks, buffer.stats.num_injections, buffer.stats.rate) == (2, 1, 0.5)
    assert buffer.coverage(["t", "t_chunk4", "x", "y"]) == 0.5
    assert buffer.coverage([]) == 0.0


def test_a_replay_row_becomes_a_trajectory_in_the_layout_of_episodes(
    renderer: Renderer, noise_png: Callable[[int, int, int], bytes]
) -> None:
    image = noise_png(64, 32, 0)
    sha256 = digest_bytes(image)
    replay = ReplayRow(**{**vars(row("abc", "t")), "image_sha256s": (sha256,)})
    trajectory = replay_trajectory(replay, {sha256: image}.__getitem__, renderer, advantage=1.5, weight=0.5)
    rendered = render_demonstration(renderer, replay.messages, [image])
    assert (trajectory.trajectory_id, trajectory.task_id) == ("replay:abc", "t")
    assert (trajectory.token_ids, trajectory.response_mask) == (rendered.token_ids, rendered.mask)
    assert trajectory.images == (image,)
    assert (trajectory.is_replay, trajectory.sampled_logprobs) == (True, None)
    assert (trajectory.advantage, trajectory.weight) == (1.5, 0.5)
    demonstration = replay_trajectory(replay, {sha256: image}.__getitem__, renderer, is_replay=False)
    assert (demonstration.trajectory_id, demonstration.is_replay) == ("demo:abc", False)


def test_a_broken_replay_row_is_named(renderer: Renderer) -> None:
    with pytest.raises(ValueError, match="replay row abc of task t: a user turn has more image placeholders"):
        replay_trajectory(row("abc", "t"), {}.__getitem__, renderer)


@pytest.mark.parametrize("outcome", [Outcome.TIMEOUT, Outcome.ENV_FAULT, Outcome.POLICY_FAULT, Outcome.GRADER_FAULT])
def test_a_fault_is_never_made_a_trajectory(outcome: Outcome) -> None:
    with pytest.raises(ValueError, match="it is not trained on"):
        episode_trajectory(episode(None, outcome), {}.__getitem__)


def test_an_episode_without_sampled_tokens_is_never_made_a_trajectory() -> None:
    with pytest.raises(ValueError, match="holds no sampled token"):
        episode_trajectory(episode(0.0), {}.__getitem__)
