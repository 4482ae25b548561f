"""What an environment's process tells of a step for the trajectory store. Apart from the rest, because it loads no
torch: there are as many of these processes as environments."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """What an environment tells of a step beyond OSGym's keys, under `record` in `env_ret`. The screenshot is the one
    that the step answered."""

    fields: Mapping[str, Any]
    """Of `domain.episode.Step`: what is not of tokens and of the stored image."""
    screenshot: bytes
    """Encoded, exactly as the model saw it."""
    suffix: str
