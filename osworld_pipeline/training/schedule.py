"""The learning rate over the updates of a stage."""

import math
from typing import Protocol


class ScheduleSettings(Protocol):
    """The settings shared by the sections `sft` and `gspo`."""

    learning_rate: float
    warmup_updates: int
    final_lr_fraction: float


def learning_rate_at(settings: ScheduleSettings, update: int, *, num_updates: int) -> float:
    """The rate of update number `update` (from 0) of `num_updates`: linear warm-up to the full rate, then cosine decay
    to `final_lr_fraction` of it at the last update."""
    if update < settings.warmup_updates:
        return settings.learning_rate * (update + 1) / settings.warmup_updates
    span = max(1, num_updates - 1 - settings.warmup_updates)
    progress = min(1.0, (update - settings.warmup_updates) / span)
    floor = settings.final_lr_fraction
    return settings.learning_rate * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))
