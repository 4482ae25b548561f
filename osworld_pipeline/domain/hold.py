"""A held update: it made no optimiser step, although there were rollouts to train on."""

from collections.abc import Mapping
from enum import StrEnum


class HoldReason(StrEnum):
    """Why an update was held. Each reason has a metric `is_held_by_<reason>`."""

    FAULTS = "faults"
    """More of its episodes ended in faults than `rollout.max_fault_share`."""
    STALENESS = "staleness"
    """The effective share of the batch was below `gspo.min_effective_share`: the samples are too far from the current
    policy."""


def hold_metrics(reason: HoldReason | None) -> Mapping[str, float]:
    """The metrics that show whether and why an update was held; None: it was not."""
    return {
        "is_held": float(reason is not None),
        **{f"is_held_by_{one}": float(one is reason) for one in HoldReason},
    }
