"""Plans the rounds of the flywheel, reads their measurements, and decides when it stops. Needs no torch.

The rollouts of a round measure the checkpoint that it starts from; its training makes the next one. Finished work of a
killed flywheel is found again: the checkpoint of a round by its id, the measurement in the groups of that name.
"""

from collections.abc import Callable
from dataclasses import dataclass

from pydantic import Field

from osworld_pipeline.domain.checkpoint import Checkpoint, Stage
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.recipes import Recipe
from osworld_pipeline.recipes.schema import SftSection
from osworld_pipeline.runs.checkpoints.ids import read_checkpoint, stage_checkpoint_id
from osworld_pipeline.runs.rollouts.embedded_server import EnvServers
from osworld_pipeline.runs.sft.job import SftJob
from osworld_pipeline.store.part_files import COMPACTED, take_snapshot
from osworld_pipeline.store.reading import read_part_table, read_rows

GROUPS = "rollout_groups"


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Result of a round's rollouts for the checkpoint that it started from."""

    num_valid: int
    num_kept: int
    """Episodes whose raw task reward reaches the threshold."""
    num_episodes: int
    """Includes faults and timeouts."""

    @property
    def success_rate(self) -> float:
        """0 without valid episodes."""
        return self.num_kept / self.num_valid if self.num_valid else 0.0


class FlywheelJob(SftJob):
    """The job of a round."""

    servers: EnvServers = Field()  # pyright: ignore[reportIncompatibleVariableOverride]
    previous: Measurement | None = None
    """The measurement of the round before."""

    @property
    def settings(self) -> SftSection:
        return self.recipe.sft.model_copy(update={"num_updates": self.recipe.flywheel.num_updates})


@dataclass(frozen=True, kw_only=True)
class Round:
    """A planned or finished round."""

    number: int
    """Starts at 1."""
    round_id: str
    """The id of the checkpoint that the round makes."""
    parent: Checkpoint
    previous: Measurement | None = None
    """The measurement of the previous round; None for the first."""
    measured: Measurement | None = None
    """None until all its rollouts have ended."""
    checkpoint: Checkpoint | None = None
    """None if the round has not ended or stopped the flywheel."""


@dataclass(frozen=True, kw_only=True)
class FlywheelResult:
    checkpoint: Checkpoint
    """The best measured checkpoint if a round stopped the flywheel, or else the newest one; the parent if no round made
    a better one."""
    rounds: tuple[Round, ...]
    stopped: str
    """Reason of the stop, by a round or by `end_reason`; empty if all rounds made checkpoints."""


RunRound = Callable[[Round], None]
"""Runs an unfinished round. Afterwards it is measured, and has a checkpoint or stops the flywheel."""


EndReason = Callable[[], str]
"""Called before each unfinished round: the reason to stop before it; empty to continue."""


def stop_reason(measured: Measurement, previous: Measurement | None, *, min_gain: float) -> str:
    """Why no training follows a round's rollouts; empty if training follows."""
    if not measured.num_valid:
        return f"none of the round's {measured.num_episodes} episodes was graded"
    if not measured.num_kept:
        return "no episode reached the threshold, so there is no new data to train on"
    if previous is not None and measured.success_rate <= previous.success_rate + min_gain:
        return (
            f"the success rate went from {previous.success_rate:.1%} to {measured.success_rate:.1%}; training follows "
            f"only after a gain of more than {min_gain:.1%} (flywheel.min_gain)"
        )
    return ""


def walk_flywheel(
    state: StateDir,
    recipe: Recipe,
    parent: Checkpoint,
    *,
    data_digest: str,
    run_round: RunRound,
    end_reason: EndReason = lambda: "",
) -> FlywheelResult:
    """Runs the unfinished rounds in order until all are done, a round stops the flywheel, or `end_reason` does. In the
    last case the newest checkpoint is the result, and the remaining rounds can be run later."""
    flywheel = recipe.flywheel
    rounds: list[Round] = []
    for number in range(1, flywheel.num_rounds + 1):
        current = rounds[-1].checkpoint if rounds else parent
        assert current is not None, "a round that left no checkpoint is the last"
        round_id = stage_checkpoint_id(Stage.FLYWHEEL, recipe, parent_id=current.checkpoint_id, data_digest=data_digest)
        previous = rounds[-1].measured if rounds else None
        one = _look(state, recipe, Round(number=number, round_id=round_id, parent=current, previous=previous))
        is_stopped = one.measured is not None and stop_reason(one.measured, previous, min_gain=flywheel.min_gain)
        if not is_stopped and (one.checkpoint is None or one.measured is None):
            if ended := end_reason():
                stopped = f"round {number} was not run: {ended}"
                return FlywheelResult(checkpoint=current, rounds=tuple(rounds), stopped=stopped)
            run_round(one)
            one = _look(state, recipe, one)
        assert one.measured is not None, f"{round_id} succeeded without a measurement"
        rounds.append(one)
        stopped = stop_reason(one.measured, previous, min_gain=flywheel.min_gain)
        if stopped:
            best = max(rounds, key=lambda each: each.measured.success_rate if each.measured else 0.0)
            return FlywheelResult(
                checkpoint=best.parent, rounds=tuple(rounds), stopped=f"round {number} was the last: {stopped}"
            )
        assert one.checkpoint is not None, f"{round_id} succeeded without a checkpoint"
    newest = rounds[-1].checkpoint if rounds else None
    return FlywheelResult(checkpoint=newest or parent, rounds=tuple(rounds), stopped="")


def read_measurement(state: StateDir, round_id: str, *, threshold: float) -> Measurement | None:
    """None until all of the round's rollouts have ended. Raises StoreError."""
    root, files = state.trajectories / GROUPS, take_snapshot(state.trajectories, GROUPS)
    columns = ["task_rewards"]
    found = [
        read_part_table(root / file.name, GROUPS, columns=columns) for file in files.small if file.part == round_id
    ]
    if not found:
        paths = [root / COMPACTED / name for name in files.compacted]
        found = [read_rows(path, GROUPS, "part", [round_id], columns=columns) for path in paths]
    rewards = [reward for table in found for row in table.column("task_rewards").to_pylist() for reward in row]
    if not rewards:
        return None
    graded = [reward for reward in rewards if reward is not None]
    num_kept = sum(reward >= threshold for reward in graded)
    return Measurement(num_valid=len(graded), num_kept=num_kept, num_episodes=len(rewards))


def _look(state: StateDir, recipe: Recipe, one: Round) -> Round:
    return Round(
        number=one.number,
        round_id=one.round_id,
        parent=one.parent,
        previous=one.previous,
        measured=read_measurement(state, one.round_id, threshold=recipe.flywheel.threshold),
        checkpoint=read_checkpoint(state, one.round_id),
    )
