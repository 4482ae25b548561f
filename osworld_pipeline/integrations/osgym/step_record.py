"""The step record that an environment's process sends for the trajectory store. A separate module that loads no torch,
because every environment is a process."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """An environment's data of a step beyond OSGym's keys, under `record` in `env_ret`. The screenshot is the one that
    the step answered."""

    fields: Mapping[str, Any]
    """Fields of `domain.episode.Step`, except tokens and the stored image."""
    screenshot: bytes
    """Encoded, exactly as in the model's input."""
    suffix: str
