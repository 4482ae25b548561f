"""The flywheel's rounds: each measures the checkpoint it starts with, and it stops where success no longer rises."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from episode_samples import make_episode

from osworld_pipeline.domain.checkpoint import Checkpoint, Stage
from osworld_pipeline.domain.episode import EpisodePurpose, Outcome, Reward
from osworld_pipeline.domain.group import RolloutGroup
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.recipes import Recipe, load_recipe
from osworld_pipeline.runs.checkpoints.ids import CARD, checkpoint_card, stage_checkpoint_id
from osworld_pipeline.runs.flywheel.plan import (
    FlywheelResult,
    Measurement,
    Round,
    read_measurement,
    stop_reason,
    walk_flywheel,
)
from osworld_pipeline.store import TrajectoryStore

SFT = Checkpoint(
    checkpoint_id="sft-1",
    stage=Stage.SFT,
    parent_id="base-1",
    path="checkpoints/sft-1",
    num_updates=4,
    recipe_digest="r",
    data_digest="d",
    weights_digest="w",
)


def recipe(**flywheel: object) -> Recipe:
    return load_recipe("smoke", settings=[f"flywheel.{key}={value}" for key, value in flywheel.items()])


class FakeRounds:
    """Runs rounds whose rollouts earn the given rewards, in turn; trains where `stop_reason` allows it."""

    def __init__(self, state: StateDir, rewards: Sequence[Sequence[float | None]], *, min_gain: float = 0.0) -> None:
        self.ran: list[int] = []
        self._state, self._rewards, self._min_gain = state, rewards, min_gain

    def __call__(self, one: Round) -> None:
        self.ran.append(one.number)
        write_groups(self._state, one.round_id, self._rewards[one.number - 1])
        measured = read_measurement(self._state, one.round_id, threshold=0.5)
        assert measured is not None
        if not stop_reason(measured, one.previous, min_gain=self._min_gain):
            write_card(self._state, one)


def write_groups(state: StateDir, round_id: str, rewards: Sequence[float | None]) -> None:
    """Writes one group with these rewards; None is a fault."""
    episodes = [
        make_episode(
            f"{round_id}-{index}",
            purpose=EpisodePurpose.TRAIN,
            outcome=Outcome.ENV_FAULT if reward is None else Outcome.SUCCESS if reward >= 0.5 else Outcome.FAILURE,
            reward=None if reward is None else Reward(task=reward, shaped=0.99),
            stage_key=round_id,
            update=0,
        )
        for index, reward in enumerate(rewards)
    ]
    group = RolloutGroup(group_id=f"{round_id}-g", task_id="t", stage_key=round_id, update=0, episodes=tuple(episodes))
    TrajectoryStore(state).write_groups(round_id, [group], ())


def write_card(state: StateDir, one: Round) -> None:
    made = replace(
        SFT, checkpoint_id=one.round_id, stage=Stage.FLYWHEEL, parent_id=one.parent.checkpoint_id, path=one.round_id
    )
    (state.checkpoints / one.round_id).mkdir(parents=True, exist_ok=True)
    (state.checkpoints / one.round_id / CARD).write_text(json.dumps(checkpoint_card(made)))


def walk(state: StateDir, run_round: Callable[[Round], None], **flywheel: object) -> FlywheelResult:
    return walk_flywheel(state, recipe(**flywheel), SFT, data_digest="d", run_round=run_round)


def never(one: Round) -> None:
    raise AssertionError(f"round {one.number} was run again")


def test_a_flywheel_without_rounds_returns_the_parent(tmp_path: Path) -> None:
    result = walk(StateDir(tmp_path), never, num_rounds=0)
    assert (result.checkpoint, result.rounds, result.stopped) == (SFT, (), "")


def test_rising_success_gives_a_chain_of_checkpoints_and_the_newest_is_the_result(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    rounds = FakeRounds(state, [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, None]])
    result = walk(state, rounds, num_rounds=3)
    assert rounds.ran == [1, 2, 3]
    assert [one.measured and one.measured.success_rate for one in result.rounds] == [0.25, 0.5, 1.0]
    assert [one.parent.checkpoint_id for one in result.rounds] == ["sft-1", *(r.round_id for r in result.rounds[:2])]
    assert result.checkpoint.checkpoint_id == result.rounds[-1].round_id
    assert result.checkpoint.parent_id == result.rounds[1].round_id


def test_a_fall_in_success_stops_the_flywheel_and_the_best_measured_checkpoint_is_the_result(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    rounds = FakeRounds(state, [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1]])
    result = walk(state, rounds, num_rounds=4)
    assert rounds.ran == [1, 2, 3]
    assert result.checkpoint.checkpoint_id == result.rounds[0].round_id, "which round 2 measured at 50%"
    assert result.rounds[-1].checkpoint is None
    assert result.stopped.startswith("round 3 was the last: the success rate went from 50.0% to 25.0%; ")


def test_a_first_round_that_lowers_success_returns_the_parent(tmp_path: Path) -> None:
    result = walk(StateDir(tmp_path), FakeRounds(StateDir(tmp_path), [[1, 1, 0, 0], [1, 0, 0, 0]]), num_rounds=3)
    assert result.checkpoint == SFT


def test_a_gain_that_is_too_small_stops_the_flywheel(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    rounds = FakeRounds(state, [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]], min_gain=0.25)
    result = walk(state, rounds, num_rounds=3, min_gain=0.25)
    assert rounds.ran == [1, 2]
    assert result.checkpoint.checkpoint_id == result.rounds[0].round_id, "better, if not by enough"


@pytest.mark.parametrize(
    ("rewards", "why"), [([0.4, 0, 0], "no new data to train on"), ([None, None], "2 episodes was graded")]
)
def test_a_round_without_a_success_stops_the_flywheel_even_with_a_high_shaped_reward(
    rewards: list, why: str, tmp_path: Path
) -> None:
    result = walk(StateDir(tmp_path), FakeRounds(StateDir(tmp_path), [rewards]), num_rounds=3)
    assert result.checkpoint == SFT
    assert why in result.stopped


def test_finished_rounds_are_found_again_and_a_longer_flywheel_continues_after_them(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    first = walk(state, FakeRounds(state, [[1, 0, 0, 0], [1, 1, 0, 0]]), num_rounds=2)
    assert walk(state, never, num_rounds=2) == first
    longer = FakeRounds(state, [[], [], [1, 1, 1, 0]])
    result = walk(state, longer, num_rounds=3)
    assert longer.ran == [3]
    assert result.rounds[:2] == first.rounds


def test_a_stopped_flywheel_runs_nothing_when_it_is_started_again(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    first = walk(state, FakeRounds(state, [[1, 0], [0, 0]]), num_rounds=5)
    assert walk(state, never, num_rounds=5) == first


def test_a_spent_budget_ends_the_flywheel_before_the_next_round_which_a_later_run_executes(tmp_path: Path) -> None:
    state, settings = StateDir(tmp_path), recipe(num_rounds=2)
    rounds = FakeRounds(state, [[1, 0, 0, 0], [1, 1, 0, 0]])

    def walk_until(end_reason: Callable[[], str]) -> FlywheelResult:
        return walk_flywheel(state, settings, SFT, data_digest="d", run_round=rounds, end_reason=end_reason)

    nothing = walk_until(lambda: "nothing is left")
    assert (nothing.checkpoint, nothing.rounds) == (SFT, ())
    first = walk_until(lambda: "nothing is left" if rounds.ran else "")
    assert first.stopped == "round 2 was not run: nothing is left"
    assert first.checkpoint.checkpoint_id == first.rounds[0].round_id
    assert walk_until(lambda: "").rounds[0] == first.rounds[0]
    assert rounds.ran == [1, 2]
    assert not walk_until(lambda: "nothing is left").stopped, "what is done costs nothing"


@pytest.mark.parametrize("written", ["groups", "nothing"])
def test_a_round_killed_before_its_checkpoint_is_run_again(written: str, tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    round_id = stage_checkpoint_id(Stage.FLYWHEEL, recipe(num_rounds=1), parent_id="sft-1", data_digest="d")
    if written == "groups":
        write_groups(state, round_id, [1, 0])
    rounds = FakeRounds(state, [[1, 0]])
    assert walk(state, rounds, num_rounds=1).checkpoint.checkpoint_id == round_id
    assert rounds.ran == [1]


def test_faults_do_not_count_in_the_success_rate(tmp_path: Path) -> None:
    write_groups(StateDir(tmp_path), "flywheel-x", [1.0, 0.5, 0.4, None])
    measured = read_measurement(StateDir(tmp_path), "flywheel-x", threshold=0.5)
    assert measured == Measurement(num_valid=3, num_kept=2, num_episodes=4)
    assert read_measurement(StateDir(tmp_path), "flywheel-y", threshold=0.5) is None
