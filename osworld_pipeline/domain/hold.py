"""A held update: it made no optimiser step, although its rollouts were to be trained on."""

from collections.abc import Mapping
from enum import StrEnum


class HoldReason(StrEnum):
    """Why. Each has a figure of its own, `is_held_by_<reason>`."""

    FAULTS = "faults"
    """More of its episodes ended in faults than `rollout.max_fault_share`."""
    STALENESS = "staleness"
    """Its importance weights left less of the batch than `gspo.min_effective_share`: the samples are too far from the
    weights that they would train."""


def hold_metrics(reason: HoldReason | None) -> Mapping[str, float]:
    """The figures of an update that say whether it was held, and why; None for one that was not."""
    return {
        "is_held": float(reason is not None),
        **{f"is_held_by_{one}": float(one is reason) for one in HoldReason},
    }
