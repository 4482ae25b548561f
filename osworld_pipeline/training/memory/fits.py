"""Checks whether a sequence fits the trainer, at collection time and before forward passes. Imports no torch."""

from osworld_pipeline.domain.trajectory import Trajectory
from osworld_pipeline.errors import TrainingError


def check_length(trajectory: Trajectory, *, max_tokens: int) -> None:
    """
    Raises:
        TrainingError: the trajectory is longer than the limit of a forward pass; names it.
    """
    num_tokens = len(trajectory.token_ids)
    if num_tokens > max_tokens:
        raise TrainingError(
            f"trajectory {trajectory.trajectory_id} has {num_tokens} tokens, more than the {max_tokens} of a forward "
            "pass: raise trainer.max_tokens_per_batch or lower agent.max_context_tokens"
        )
