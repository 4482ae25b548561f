"""A flywheel's round before its training: the tasks it takes, what it keeps, and what is not run again after a kill."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from episode_samples import make_episode

from osworld_pipeline.domain.episode import Episode, EpisodePurpose, Outcome, Reward, SamplingParams
from osworld_pipeline.domain.group import GroupStatus, RolloutGroup
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.domain.task import Task
from osworld_pipeline.recipes.schema import FlywheelSection
from osworld_pipeline.rollout.run_episode import EpisodePlan
from osworld_pipeline.rollout.run_group import GroupPlan, gather_groups
from osworld_pipeline.runs.flywheel.flywheel import (
    choose_tasks,
    judge_group,
    kept_episodes,
    known_episodes,
    measure,
    remembering,
)
from osworld_pipeline.runs.flywheel.plan import Measurement
from osworld_pipeline.runs.gspo.metrics import reward_lines
from osworld_pipeline.store import TrajectoryStore

TASKS = [
    Task.from_config({"id": f"t{index}", "instruction": "Do it.", "evaluator": {"func": "exact_match"}})
    for index in range(6)
]
PLAN = GroupPlan(
    stage_key="flywheel-1",
    update=0,
    group_size=2,
    checkpoint_id="sft-1",
    sampling=SamplingParams(temperature=0.8, seed=3),
)
PLANNED = [(task, PLAN, f"flywheel-1-u0000-g{index:02d}") for index, task in enumerate(TASKS[:2])]


def ended(plan: EpisodePlan, reward: Reward | None) -> Episode:
    return make_episode(
        plan.episode_id,
        purpose=EpisodePurpose.TRAIN,
        outcome=Outcome.FAILURE if reward is not None else Outcome.ENV_FAULT,
        reward=reward,
        group_id=plan.group_id,
    )


class Desktops:
    """Ends every episode with a failure, and those named in `faults` with a fault."""

    def __init__(self, *faults: str) -> None:
        self.ran: list[str] = []
        self._faults = faults

    async def __call__(self, task: Task, plan: EpisodePlan) -> Episode:
        self.ran.append(plan.episode_id)
        await asyncio.sleep(0)
        return ended(plan, None if plan.episode_id.endswith(self._faults) else Reward(task=0.0))


async def roll_out(store: TrajectoryStore, desktops: Desktops, *, is_over: bool = False) -> list[str]:
    reported: list[Episode] = []
    known = known_episodes(store, PLANNED, is_over=is_over)
    groups = await gather_groups(PLANNED, remembering(known, store, reported.append, run_one=desktops))
    assert len(reported) == 4
    return [episode.episode_id for group in groups for episode in group.episodes]


async def test_a_round_killed_half_way_runs_only_what_was_not_graded(tmp_path: Path) -> None:
    store = TrajectoryStore(StateDir(tmp_path))
    first = Desktops("g00-s01")
    names = await roll_out(store, first)
    assert sorted(first.ran) == sorted(names) == store.existing_parts()

    again = Desktops("g00-s01")
    assert await roll_out(store, again) == names
    assert again.ran == ["flywheel-1-u0000-g00-s01"], "a fault is run again, a failure is not"

    over = Desktops()
    assert await roll_out(store, over, is_over=True) == names
    assert over.ran == [], "once the rollouts are over their faults stand"


def test_every_round_takes_the_same_tasks_by_seed() -> None:
    chosen = choose_tasks(TASKS, FlywheelSection(max_tasks=3))
    assert len(chosen) == 3
    assert choose_tasks(TASKS, FlywheelSection(max_tasks=3)) == chosen
    assert any(choose_tasks(TASKS, FlywheelSection(max_tasks=3, seed=seed)) != chosen for seed in range(1, 6))
    assert choose_tasks(TASKS, FlywheelSection()) == choose_tasks(TASKS, FlywheelSection(max_tasks=99)) == TASKS


def group(*rewards: Reward | None) -> RolloutGroup:
    episodes = [
        make_episode(f"e{index}", outcome=Outcome.SUCCESS if reward else Outcome.GRADER_FAULT, reward=reward)
        for index, reward in enumerate(rewards)
    ]
    return RolloutGroup(group_id="g", task_id="t", stage_key="s", update=0, episodes=tuple(episodes))


def test_raw_task_reward_alone_decides_what_is_kept() -> None:
    one = group(Reward(task=0.49, shaped=1.0), Reward(task=0.5, shaped=0.0), None)
    assert [episode.episode_id for episode in kept_episodes([one], 0.5)] == ["e1"]
    assert measure([one], 0.5) == Measurement(num_valid=2, num_kept=1, num_episodes=3)
    assert judge_group(one, 0.5) == one


@pytest.mark.parametrize("rewards", [[None, None], [Reward(task=0.0)]])
def test_a_group_without_a_success_is_not_kept_and_has_the_reason(rewards: list[Any]) -> None:
    judged = judge_group(group(*rewards), 0.5)
    assert judged.status is GroupStatus.NOT_KEPT
    assert judged.reason == "no episode reached a raw task reward of 0.5"


def test_rewards_are_printed_with_their_parts_up_to_the_number_in_the_recipe() -> None:
    reward = Reward(task=1.0, partial=0.25, penalty=0.1, shaped=0.975, parts={"efficiency": 0.5})
    groups = [group(None, reward), group(reward)]
    (line,) = reward_lines(groups, limit=1)
    assert line == "e1: task 1, partial 0.250, penalty 0.100, shaped 0.975 (efficiency 0.500)"
    assert len(reward_lines(groups, limit=5)) == 2, "a fault has no reward to tell"
    assert reward_lines(groups, limit=0) == []
