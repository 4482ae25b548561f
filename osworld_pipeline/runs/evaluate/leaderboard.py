"""The leaderboard of a state folder: all evaluations, each checkpoint compared with its parent."""

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.evaluation.leaderboard import Leaderboard, build_leaderboard
from osworld_pipeline.evaluation.scores import read_evals
from osworld_pipeline.runs.checkpoints.registry import all_checkpoints
from osworld_pipeline.runs.upkeep.invariants import MAX_FOUND, Violations


def read_leaderboard(state: StateDir, *, confidence: float = 0.95) -> Leaderboard:
    """Raises TableError."""
    parents = {checkpoint.checkpoint_id: checkpoint.parent_id for checkpoint in all_checkpoints(state)}
    return build_leaderboard(read_evals(state), parents, planned={}, confidence=confidence)


def worse_than_their_parents(state: StateDir) -> Violations:
    """Checkpoints that a paired comparison ranks below their parents. Raises TableError."""
    found = [
        (row.score.checkpoint_id, row.versus_parent.checkpoint_id, comparison.before, comparison.after, comparison.high)
        for table in read_leaderboard(state).tables
        for row in table.rows
        if row.versus_parent is not None
        and (comparison := row.versus_parent.changes.comparison) is not None
        and comparison.is_worse
    ]
    columns = ("checkpoint", "parent", "success of the parent", "success", "upper limit of the difference")
    return Violations(columns=columns, rows=tuple(found[:MAX_FOUND]), num_found=len(found))
