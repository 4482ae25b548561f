"""From scored groups to the batch of an update: raw rewards decide on replay, shaped rewards give the advantages."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from episode_samples import make_sequence
from replay_samples import make_row, write_rows

from osworld_pipeline.agent.observation_text import assistant_message, system_message, user_message
from osworld_pipeline.agent.renderer import Renderer
from osworld_pipeline.domain.digest import digest_bytes
from osworld_pipeline.domain.episode import Episode, EpisodePurpose, Outcome, Reward, SamplingParams
from osworld_pipeline.domain.group import GroupStatus, RolloutGroup
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import StoreError
from osworld_pipeline.recipes import load_recipe
from osworld_pipeline.rollout.batch import GspoBatch, as_held
from osworld_pipeline.rollout.replay import ReplayBuffer
from osworld_pipeline.runs.gspo.batch import RowRenderer, StageBatchBuilder, build_batch
from osworld_pipeline.training.objective.advantage import SignalRule

RECIPE = load_recipe("smoke")


def episode(name: str, *, task_reward: float, shaped: float, outcome: Outcome = Outcome.FAILURE) -> Episode:
    return Episode(
        episode_id=name,
        task_id="t",
        task_digest="d",
        purpose=EpisodePurpose.TRAIN,
        checkpoint_id="c",
        engine="fake",
        sampling=SamplingParams(temperature=1.0),
        outcome=outcome,
        reward=Reward(task=task_reward, shaped=shaped) if outcome.is_valid else None,
        sequences=(make_sequence(token_ids=(5, 6, 7), sampled_logprobs=(0.0, -1.0, -2.0), num_images=0),),
    )


@pytest.fixture
def batch_of(
    tmp_path: Path, renderer: Renderer, noise_png: Callable[[int, int, int], bytes]
) -> Callable[..., GspoBatch]:
    image = noise_png(64, 64, 1)
    turns = (system_message("s"), user_message("u"), assistant_message("Action: a"))
    state = StateDir(tmp_path)
    write_rows(state, make_row("row-of-the-buffer", messages=list(turns), images=[digest_bytes(image)], licence="mit"))

    def find_episode(episode_id: str) -> Episode:
        raise AssertionError("a demonstration is no episode")

    def build(
        *episodes: Episode,
        read_blob: Callable[[str], bytes] = lambda _: image,
        group_ids: Sequence[str] = ("g",),
        threshold: float = 0.5,
        **choices: Any,
    ) -> GspoBatch:
        groups = [
            RolloutGroup(group_id=group_id, task_id="t", stage_key="k", update=0, episodes=episodes)
            for group_id in group_ids
        ]
        section = RECIPE.replay.model_copy(update={"threshold": threshold})
        with ReplayBuffer(state, section) as replay:
            return build_batch(
                groups,
                update=0,
                replay=replay,
                settings=section,
                render_row=RowRenderer(
                    agent=RECIPE.agent,
                    renderer=renderer,
                    temperature=0.5,
                    read_blob=read_blob,
                    find_episode=find_episode,
                ),
                read_blob=read_blob,
                **choices,
            )

    return build


def test_group_that_failed_gets_a_replay_row_and_the_injection_says_which(batch_of: Callable[..., GspoBatch]) -> None:
    batch = batch_of(episode("a", task_reward=0, shaped=0.1), episode("b", task_reward=0, shaped=0.1))
    # Rewards 0.1, 0.1, 1.0: mean 0.4, standard deviation 0.9 / sqrt(3).
    assert [trajectory.advantage for trajectory in batch.trajectories] == pytest.approx(
        [-0.57735, -0.57735, 1.1547], 1e-4
    )
    assert [trajectory.is_replay for trajectory in batch.trajectories] == [False, False, True]
    assert batch.trajectories[-1].sampled_logprobs is None
    (injection,) = batch.injections
    assert (injection.group_id, injection.row_id, injection.source_dataset) == ("g", "row-of-the-buffer", "sft_clean")
    assert injection.advantage == pytest.approx(1.1547, 1e-4)
    assert (injection.kind, injection.strategy, injection.verified_reward) == ("demonstration", "uniform", None)
    place = (injection.source_path, injection.source_line, injection.source_sha256, injection.licence)
    assert place == ("file.jsonl", 1, "5a" * 32, "mit")
    assert batch.groups[0].replay is not None


def test_a_row_that_joins_two_groups_is_two_episodes_for_the_trainer(batch_of: Callable[..., GspoBatch]) -> None:
    failures = [episode(name, task_reward=0, shaped=0.1) for name in "ab"]
    batch = batch_of(*failures, group_ids=("g", "h"))
    assert [injection.row_id for injection in batch.injections] == ["row-of-the-buffer"] * 2
    replayed = [trajectory.trajectory_id for trajectory in batch.trajectories if trajectory.is_replay]
    assert replayed == ["g/replay:row-of-the-buffer", "h/replay:row-of-the-buffer"]


def test_a_shaped_reward_alone_never_prevents_replay(batch_of: Callable[..., GspoBatch]) -> None:
    batch = batch_of(episode("a", task_reward=0, shaped=0.9), episode("b", task_reward=0, shaped=0.2))
    assert len(batch.injections) == 1


def test_one_raw_success_prevents_replay(batch_of: Callable[..., GspoBatch]) -> None:
    success = episode("a", task_reward=1, shaped=1.0, outcome=Outcome.SUCCESS)
    batch = batch_of(success, episode("b", task_reward=0, shaped=0.0))
    assert batch.injections == ()
    assert [trajectory.trajectory_id for trajectory in batch.trajectories] == ["a", "b"]
    assert [trajectory.advantage for trajectory in batch.trajectories] == pytest.approx([0.7071, -0.7071], 1e-3)


def test_group_of_equal_successes_trains_nothing_and_is_counted(batch_of: Callable[..., GspoBatch]) -> None:
    successes = [episode(name, task_reward=1, shaped=1.0, outcome=Outcome.SUCCESS) for name in "ab"]
    batch = batch_of(*successes)
    assert batch.trajectories == ()
    assert batch.num_groups(GroupStatus.ZERO_VARIANCE) == 1
    assert len(batch.groups) == 1, "the group is recorded all the same"


@pytest.mark.parametrize(
    ("denominator", "of_mixed", "of_equal"), [("signal", "ac", ""), ("group", "abc", ""), ("batch", "abc", "de")]
)
def test_the_recipe_says_which_members_without_advantage_the_loss_counts(
    batch_of: Callable[..., GspoBatch], denominator: str, of_mixed: str, of_equal: str
) -> None:
    # Rewards 1, 0.5 and 0: the one in the middle has no advantage.
    mixed = [
        episode(name, task_reward=reward, shaped=reward, outcome=Outcome.SUCCESS)
        for name, reward in zip("abc", (1.0, 0.5, 0.0), strict=True)
    ]
    equal = [episode(name, task_reward=1, shaped=1.0, outcome=Outcome.SUCCESS) for name in "de"]
    for episodes, counted in ((mixed, of_mixed), (equal, of_equal)):
        batch = batch_of(*episodes, denominator=denominator)
        assert [trajectory.trajectory_id for trajectory in batch.trajectories] == list(counted)
    assert batch.num_groups(GroupStatus.ZERO_VARIANCE) == 1


def test_a_replay_row_is_scored_at_the_temperature_of_the_phase(batch_of: Callable[..., GspoBatch]) -> None:
    batch = batch_of(episode("a", task_reward=0, shaped=0.1), episode("b", task_reward=0, shaped=0.1))
    assert batch.trajectories[-1].is_replay
    assert batch.trajectories[-1].temperature == 0.5


def test_a_group_with_too_few_valid_episodes_is_dropped_with_the_reason_and_gets_no_replay(
    batch_of: Callable[..., GspoBatch],
) -> None:
    fault = replace(episode("a", task_reward=0, shaped=0, outcome=Outcome.ENV_FAULT), error="the desktop died")
    for others in ((replace(fault, episode_id="b"),), (episode("b", task_reward=0, shaped=0.3),)):
        batch = batch_of(fault, *others)
        assert (batch.trajectories, batch.injections) == ((), ())
        (group,) = batch.groups
        assert (group.status, group.replay) == (GroupStatus.TOO_FEW_VALID, None)
        assert "episodes are valid, 2 are needed; the last fault was env_fault: the desktop died" in group.reason


def test_a_fault_is_not_a_sample(batch_of: Callable[..., GspoBatch]) -> None:
    fault = episode("a", task_reward=0, shaped=0, outcome=Outcome.ENV_FAULT)
    batch = batch_of(fault, episode("b", task_reward=0, shaped=0.3), episode("c", task_reward=0, shaped=0.1))
    assert [trajectory.trajectory_id for trajectory in batch.trajectories] == ["b", "c", "g/replay:row-of-the-buffer"]


def test_each_episode_has_the_advantage_that_its_update_uses_to_train_on_it(batch_of: Callable[..., GspoBatch]) -> None:
    fault = episode("a", task_reward=0, shaped=0, outcome=Outcome.ENV_FAULT)
    batch = batch_of(fault, episode("b", task_reward=0, shaped=0.3), episode("c", task_reward=0, shaped=0.1))
    by_episode = {one.trajectory_id: one.advantage for one in batch.trajectories}
    (group,) = batch.groups
    assert [one.advantage for one in group.episodes] == [None, by_episode["b"], by_episode["c"]]
    assert by_episode["b"] > by_episode["c"]
    flat = batch_of(*(episode(name, task_reward=1, shaped=1, outcome=Outcome.SUCCESS) for name in ("a", "b")))
    assert [one.advantage for one in flat.episodes] == [0.0, 0.0], "its group had no signal"
    held = as_held(batch, "down", update=0, num_try=1)
    assert [one.advantage for one in held.episodes] == [None] * 3, "nothing of it is trained on"
    lonely = batch_of(fault, episode("b", task_reward=0, shaped=0.3))
    assert [one.advantage for one in lonely.episodes] == [None, None]


@pytest.mark.parametrize(("signal", "trained"), [("task", []), ("shaped", ["a", "b"])])
def test_a_row_whose_image_is_missing_is_skipped_and_the_signal_is_that_of_the_group_alone(
    batch_of: Callable[..., GspoBatch], signal: SignalRule, trained: list[str]
) -> None:
    def gone(sha256: str) -> bytes:
        raise StoreError(f"image {sha256} is missing")

    failures = (episode("a", task_reward=0, shaped=0.1), episode("b", task_reward=0, shaped=0.3))
    batch = batch_of(*failures, read_blob=gone, signal=signal)
    assert [trajectory.trajectory_id for trajectory in batch.trajectories] == trained
    assert batch.injections == ()
    (skipped,) = batch.skipped
    assert (skipped.row_id, "is missing" in skipped.reason) == ("row-of-the-buffer", True)


SUCCEEDED = [
    episode(name, task_reward=1, shaped=shaped, outcome=Outcome.SUCCESS) for name, shaped in (("a", 1.0), ("b", 0.99))
]
PARTLY = [episode("a", task_reward=0.6, shaped=0.61), episode("b", task_reward=0.6, shaped=0.612)]


@pytest.mark.parametrize("episodes", [SUCCEEDED, PARTLY], ids=["all succeeded", "equal partial credit"])
def test_the_graders_rewards_decide_if_a_group_without_replay_trains_unless_the_signal_is_shaped(
    batch_of: Callable[..., GspoBatch], episodes: Sequence[Episode]
) -> None:
    by_grader = batch_of(*episodes)
    assert (by_grader.trajectories, by_grader.injections) == ((), ())
    (group,) = by_grader.groups
    assert group.status is GroupStatus.ZERO_VARIANCE
    assert 'rollout.signal = "task"' in group.reason
    by_shape = batch_of(*episodes, signal="shaped")
    assert [trajectory.trajectory_id for trajectory in by_shape.trajectories] == ["a", "b"]


def test_replay_joins_a_group_of_equal_partial_credit_under_the_threshold(batch_of: Callable[..., GspoBatch]) -> None:
    batch = batch_of(*PARTLY, threshold=0.8)
    assert [trajectory.trajectory_id for trajectory in batch.trajectories] == ["a", "b", "g/replay:row-of-the-buffer"]
    assert batch.groups[0].status is GroupStatus.TRAINED


def test_differing_partial_credit_is_trained_on_with_shaped_rewards(batch_of: Callable[..., GspoBatch]) -> None:
    batch = batch_of(episode("a", task_reward=0.6, shaped=0.9), episode("b", task_reward=0.7, shaped=0.8))
    assert [trajectory.advantage for trajectory in batch.trajectories] == pytest.approx([0.7071, -0.7071], 1e-3)


def test_a_row_whose_image_is_damaged_is_skipped(batch_of: Callable[..., GspoBatch]) -> None:
    failures = [episode(name, task_reward=0, shaped=0.1) for name in "ab"]
    batch = batch_of(*failures, read_blob=lambda _: b"no image at all")
    assert [skipped.row_id for skipped in batch.skipped] == ["row-of-the-buffer"]


def test_injections_of_an_update_are_limited_across_all_groups_that_are_considered_for_it(
    tmp_path: Path, renderer: Renderer, noise_png: Callable[[int, int, int], bytes]
) -> None:
    image, state = noise_png(64, 64, 1), StateDir(tmp_path)
    turns = (system_message("s"), user_message("u"), assistant_message("Action: a"))
    write_rows(state, make_row("row", messages=list(turns), images=[digest_bytes(image)]))
    section = RECIPE.replay.model_copy(update={"max_injections": 1})
    failures = tuple(episode(name, task_reward=0, shaped=0.1) for name in "ab")
    with ReplayBuffer(state, section) as replay:
        builder = StageBatchBuilder(
            replay=replay,
            settings=section,
            render_row=RowRenderer(
                agent=RECIPE.agent,
                renderer=renderer,
                temperature=0.5,
                read_blob=lambda _: image,
                find_episode=lambda _: failures[0],
            ),
            read_blob=lambda _: image,
            estimator="mean_std",
            denominator="group",
            signal="task",
            min_valid=2,
            max_tokens=4096,
        )
        batches = [
            builder(
                [RolloutGroup(group_id=name, task_id="t", stage_key="k", update=0, episodes=failures)], update=update
            )
            for name, update in (("g0", 0), ("g1", 0), ("g2", 1))
        ]
        builder.give_back(1, update=0)
        again = builder(batches[0].groups, update=0)
    assert [len(batch.injections) for batch in batches] == [1, 0, 1]
    assert len(again.injections) == 1, "those of an update that was held are free again"
    statuses = [batch.groups[0].status for batch in batches]
    assert statuses == [GroupStatus.TRAINED, GroupStatus.ZERO_VARIANCE, GroupStatus.TRAINED]
