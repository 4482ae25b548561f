"""The names of policy engines: ours, and those that other distributions register as entry points."""

from importlib.metadata import entry_points
from typing import Annotated

from pydantic import AfterValidator

ENTRY_POINTS = "osworld_pipeline.engines"
"""The group in which a distribution registers its engines (runs/rollouts/engine_kinds.py)."""
TRANSFORMERS, SGLANG, OPENAI = OURS = ("transformers", "sglang", "openai")


def engine_names() -> tuple[str, ...]:
    return (*OURS, *sorted({point.name for point in entry_points(group=ENTRY_POINTS)} - set(OURS)))


def _known(name: str) -> str:
    if name not in OURS and name not in (names := engine_names()):
        raise ValueError(
            f"no engine is named {name!r}; there are: {', '.join(names)}. Install the distribution that has it "
            f"(an entry point of the group {ENTRY_POINTS})"
        )
    return name


EngineName = Annotated[str, AfterValidator(_known)]
