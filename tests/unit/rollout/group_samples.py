"""Groups and tasks for the collectors' tests: episodes without a desktop, each with a given outcome."""

from collections.abc import Sequence

from episode_samples import make_step

from osworld_pipeline.domain.episode import (
    Episode,
    EpisodePurpose,
    Outcome,
    Reward,
    SamplingParams,
    TokenSequence,
)
from osworld_pipeline.domain.group import GroupStatus, RolloutGroup
from osworld_pipeline.domain.task import Task
from osworld_pipeline.domain.trajectory import Trajectory
from osworld_pipeline.rollout.batch import GspoBatch
from osworld_pipeline.rollout.replay import ReplayStats

SAMPLING = SamplingParams(temperature=0.8, seed=3)


def make_tasks(count: int) -> list[Task]:
    config = {"instruction": "Do it.", "evaluator": {"func": "exact_match"}}
    return [Task.from_config({"id": f"t{index}", **config}) for index in range(count)]


def make_ended(
    episode_id: str = "e", *, outcome: Outcome = Outcome.FAILURE, shaped: float = 0.0, versions: Sequence[int] = (0,)
) -> Episode:
    """An episode that ended with this outcome, with one turn for each of `versions`."""
    return Episode(
        episode_id=episode_id,
        task_id="t0",
        task_digest="d",
        purpose=EpisodePurpose.TRAIN,
        checkpoint_id="c",
        engine="fake",
        sampling=SAMPLING,
        outcome=outcome,
        error=None if outcome.is_valid else f"it was a {outcome}",
        reward=Reward(task=float(outcome is Outcome.SUCCESS), shaped=shaped) if outcome.is_valid else None,
        steps=tuple(
            make_step(policy_version=version, prompt_num_tokens=1, response_num_tokens=2) for version in versions
        ),
        sequences=(
            TokenSequence(
                token_ids=(1, *range(2, 2 + len(versions))),
                response_mask=(0, *(1 for _ in versions)),
                sampled_logprobs=(0.0, *(-1.0 for _ in versions)),
                policy_versions=(-1, *versions),
                image_steps=(),
            ),
        ),
    )


def make_group(group_id: str, task: Task, update: int, episodes: Sequence[Episode]) -> RolloutGroup:
    return RolloutGroup(group_id=group_id, task_id=task.task_id, stage_key="s", update=update, episodes=tuple(episodes))


class BuilderByRewards:
    """Trains groups in which two valid episodes have different rewards, with one trajectory for each episode."""

    def __init__(self) -> None:
        self.given_back: list[tuple[int, int]] = []

    def __call__(self, groups: Sequence[RolloutGroup], *, update: int) -> GspoBatch:
        return build_batch_by_rewards(groups)

    def give_back(self, num_injections: int, *, update: int) -> None:
        self.given_back.append((update, num_injections))


def build_batch_by_rewards(groups: Sequence[RolloutGroup]) -> GspoBatch:
    built, trajectories = [], []
    for group in groups:
        rewards = {one.reward.shaped for one in group.valid_episodes if one.reward is not None}
        status = GroupStatus.TRAINED if len(rewards) > 1 else GroupStatus.ZERO_VARIANCE
        status = status if len(group.valid_episodes) > 1 else GroupStatus.TOO_FEW_VALID
        built.append(
            RolloutGroup(**{**vars(group), "status": status, "reason": "" if status is GroupStatus.TRAINED else "so"})
        )
        if status is GroupStatus.TRAINED:
            trajectories += [
                Trajectory(
                    trajectory_id=one.episode_id,
                    task_id=one.task_id,
                    token_ids=one.sequences[0].token_ids,
                    response_mask=one.sequences[0].response_mask,
                    policy_versions=one.sequences[0].policy_versions,
                    images=(),
                    advantage=1.0,
                )
                for one in group.valid_episodes
            ]
    return GspoBatch(groups=tuple(built), trajectories=tuple(trajectories), replay=ReplayStats(num_checks=len(groups)))
