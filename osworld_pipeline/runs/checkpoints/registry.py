"""Checkpoints that can be evaluated: final checkpoints of stages, and milestones stored next to them."""

from osworld_pipeline.domain.checkpoint import Checkpoint, Stage
from osworld_pipeline.domain.near_names import did_you_mean
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import TableError
from osworld_pipeline.runs.checkpoints.ids import CARD, read_checkpoint
from osworld_pipeline.tables.checkpoints import find_checkpoint, read_checkpoints, upsert_checkpoint


def all_checkpoints(state: StateDir) -> list[Checkpoint]:
    """Those of the table and those that exist only as folders so far, by stage and number of updates."""
    found = {checkpoint.checkpoint_id: checkpoint for checkpoint in read_checkpoints(state)}
    for card in sorted(state.checkpoints.glob(f"*/{CARD}")):
        if card.parent.name not in found and (checkpoint := read_checkpoint(state, card.parent.name)) is not None:
            found[checkpoint.checkpoint_id] = checkpoint
    stages = list(Stage)
    return sorted(found.values(), key=lambda one: (stages.index(one.stage), one.num_updates, one.checkpoint_id))


def register_checkpoint(state: StateDir, checkpoint_id: str) -> Checkpoint:
    """The checkpoint of that id; adds its row to the table if it is missing.

    Raises:
        TableError: there is no such checkpoint; names the existing ones.
    """
    found = find_checkpoint(state, checkpoint_id)
    if found is not None:
        return found
    checkpoint = read_checkpoint(state, checkpoint_id)
    if checkpoint is None:
        raise no_such_checkpoint(state, checkpoint_id)
    upsert_checkpoint(state, checkpoint)
    return checkpoint


def no_such_checkpoint(state: StateDir, checkpoint_id: str) -> TableError:
    """Names the existing checkpoints, and a similar id if there is one."""
    known = [one.checkpoint_id for one in all_checkpoints(state)]
    there = ", ".join(known) or "none yet"
    near = did_you_mean(checkpoint_id, known)
    return TableError(f"no checkpoint '{checkpoint_id}' in {state.checkpoints}; there are: {there}{near}")


def newest_checkpoint(state: StateDir) -> Checkpoint | None:
    """The checkpoint whose card was written last; None if there are none."""
    cards = sorted(state.checkpoints.glob(f"*/{CARD}"), key=lambda card: (card.stat().st_mtime_ns, card.parent.name))
    return register_checkpoint(state, cards[-1].parent.name) if cards else None
