"""Decides whether to train the champion further: checks for new data, and counts re-trainings that brought no new
champion."""

from collections.abc import Sequence
from dataclasses import dataclass

from osworld_pipeline.domain.checkpoint import Checkpoint, Stage
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.recipes import Recipe
from osworld_pipeline.recipes.schema import RetrainingSection
from osworld_pipeline.runs.checkpoints.ids import (
    CARD,
    flywheel_data_digest,
    gspo_data_digest,
    read_checkpoint,
    stage_checkpoint_id,
)
from osworld_pipeline.runs.flywheel.plan import Round, walk_flywheel
from osworld_pipeline.tables.replay.rows import part_views

RETRAINING_TAG = "osworld/retraining"
"""Tag of a Dagster run that trains a checkpoint further: the id of that checkpoint."""
_NEW = """
WITH proven AS (
    SELECT row_id, min(started_at) AS proven_at FROM replay_verifications
    WHERE outcome IN ('success', 'failure') AND reward >= $threshold GROUP BY row_id
), earned AS (
    SELECT list_contains($retrainings, coalesce(run_ids['dagster'], '')) AS is_own FROM episodes
    WHERE purpose = 'train' AND is_valid AND task_reward >= $threshold AND started_at >= $since
)
SELECT (SELECT count(*) FROM proven WHERE proven_at >= $since),
       (SELECT count(*) FROM earned WHERE NOT is_own),
       (SELECT count(*) FROM earned WHERE is_own)
"""


@dataclass(frozen=True, kw_only=True)
class Retraining:
    """A re-training that has started, with any result."""

    run_id: str
    """Dagster's."""
    champion_id: str
    """The checkpoint that it started from."""
    began_at: float
    """Unix time."""


@dataclass(frozen=True, kw_only=True)
class NewData:
    """New data since the last re-training of any champion began; without one, since the champion was made."""

    verified: int
    """Demonstrations whose playback first reached the threshold."""
    rolled_out: int
    """Successful training episodes, except those of `by_retrainings`."""
    by_retrainings: int
    """Successful episodes of re-trainings of this champion. They are not new data without a new champion, because the
    next re-training starts from the same checkpoint."""
    is_data_new: bool
    """Whether the replay buffer or the training tasks have changed."""

    @property
    def successes(self) -> int:
        return self.verified + self.rolled_out + self.by_retrainings


@dataclass(frozen=True, kw_only=True)
class Decision:
    is_due: bool
    reason: str
    """One sentence."""


def new_data_since(
    state: StateDir, champion_id: str, history: Sequence[Retraining], *, threshold: float, is_data_new: bool
) -> NewData:
    """`history`: as in decide. `threshold`: minimum raw task reward of a success. Raises TableError, StoreError."""
    asked = {
        "since": last_look(state, champion_id, history),
        "threshold": threshold,
        "retrainings": [one.run_id for one in _of_champion(champion_id, history)],
    }
    with part_views(state, "episodes", "replay_verifications") as views:
        row = views.execute(_NEW, asked).fetchone()
    assert row is not None, "three counts are always a row"
    return NewData(verified=row[0], rolled_out=row[1], by_retrainings=row[2], is_data_new=is_data_new)


def last_look(state: StateDir, champion_id: str, history: Sequence[Retraining]) -> float:
    """Unix time at which the last re-training began; without one, that at which the champion was made."""
    if history:
        return history[0].began_at
    return (state.checkpoints / champion_id / CARD).stat().st_mtime


def decide(
    section: RetrainingSection,
    champion_id: str,
    history: Sequence[Retraining],
    new_data: NewData,
    *,
    is_scheduled: bool,
) -> Decision:
    """`history`: earlier re-trainings, newest first. A scheduled re-training needs no new data, but `patience` applies
    to it."""
    num_in_vain = len(_of_champion(champion_id, history))
    count = f"{new_data.successes} of {section.min_new_successes} new successes"
    is_fresh = new_data.is_data_new or new_data.verified + new_data.rolled_out >= section.min_new_successes
    if num_in_vain >= section.patience and not is_fresh:
        reason = f"{num_in_vain} re-trainings of {champion_id} brought no new champion, and there is no new data since"
        return Decision(is_due=False, reason=f"{reason} (retraining.patience)")
    if new_data.is_data_new:
        return Decision(is_due=True, reason="the replay buffer or the training tasks have changed")
    if new_data.successes >= section.min_new_successes:
        return Decision(is_due=True, reason=count)
    if is_scheduled:
        return Decision(is_due=True, reason=f"it is scheduled; {count}")
    return Decision(is_due=False, reason=f"{count} (retraining.min_new_successes), and the same data as before")


def end_that_is_there(state: StateDir, recipe: Recipe, champion: Checkpoint) -> Checkpoint | None:
    """The final checkpoint of training `champion` further with this recipe and the current tables, if all of its stages
    are done; None if anything remains to be trained. Raises TableError."""
    unfinished: list[str] = []

    def note_unfinished() -> str:
        unfinished.append("a round")
        return "nothing is run here"

    def run_nothing(one: Round) -> None:
        raise AssertionError(f"{one.round_id} must not run here")

    data_digest = flywheel_data_digest(state, recipe)
    parent = walk_flywheel(
        state, recipe, champion, data_digest=data_digest, run_round=run_nothing, end_reason=note_unfinished
    ).checkpoint
    if unfinished:
        return None
    data_digest = gspo_data_digest(state, recipe)
    for stage in (Stage.GSPO_PHASE1, Stage.GSPO_PHASE2):
        checkpoint_id = stage_checkpoint_id(stage, recipe, parent_id=parent.checkpoint_id, data_digest=data_digest)
        found = read_checkpoint(state, checkpoint_id)
        if found is None:
            return None
        parent = found
    return parent


def _of_champion(champion_id: str, history: Sequence[Retraining]) -> list[Retraining]:
    """Re-trainings of this champion; none of them made a new champion, because it is still the champion."""
    return [one for one in history if one.champion_id == champion_id]
