"""The checkpoints table: one row for each checkpoint, written by the stage that made it."""

from osworld_pipeline.atomic_io import locked
from osworld_pipeline.columns import checkpoint_from, checkpoint_row
from osworld_pipeline.domain.checkpoint import Checkpoint, Stage
from osworld_pipeline.domain.near_names import did_you_mean
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import TableError
from osworld_pipeline.tables.owned import need_known_columns, read_table, table_path, write_table

LOCK_TIMEOUT_S = 60.0


def upsert_checkpoint(state: StateDir, checkpoint: Checkpoint) -> None:
    """Adds a checkpoint, or replaces the row of the same id. Raises TableError, StoreError."""
    lock = table_path(state, "checkpoints").with_suffix(".lock")
    with locked(lock, timeout_s=LOCK_TIMEOUT_S, error=TableError, what="the checkpoints table"):
        need_known_columns(state, "checkpoints")
        rows = {row["checkpoint_id"]: row for row in read_table(state, "checkpoints").to_pylist()}
        rows[checkpoint.checkpoint_id] = checkpoint_row(checkpoint)
        write_table(state, "checkpoints", [rows[key] for key in sorted(rows)])


def read_checkpoints(state: StateDir) -> list[Checkpoint]:
    """All checkpoints, parents before children as far as their stages show it."""
    order = {stage: index for index, stage in enumerate(Stage)}
    checkpoints = [checkpoint_from(row) for row in read_table(state, "checkpoints").to_pylist()]
    return sorted(checkpoints, key=lambda checkpoint: (order[checkpoint.stage], checkpoint.checkpoint_id))


def find_checkpoint(state: StateDir, checkpoint_id: str) -> Checkpoint | None:
    return next((found for found in read_checkpoints(state) if found.checkpoint_id == checkpoint_id), None)


def read_checkpoint_row(state: StateDir, checkpoint_id: str) -> Checkpoint:
    """The checkpoint of that id.

    Raises:
        TableError: there is none; the message lists the existing ones.
    """
    found = find_checkpoint(state, checkpoint_id)
    if found is None:
        known = [row.checkpoint_id for row in read_checkpoints(state)]
        there = ", ".join(known) or "none yet"
        raise TableError(
            f"no checkpoint '{checkpoint_id}' in {state.tables}; there are: {there}{did_you_mean(checkpoint_id, known)}"
        )
    return found
