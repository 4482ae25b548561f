"""The updates before a given one: earlier updates of its stage, and those that made its parents."""

from collections.abc import Sequence
from typing import Any

from osworld_pipeline.domain.checkpoint import Ancestor

BEFORE = 'list_contains($stages, stage_key) AND coalesce("update", 1) <= $ends[list_position($stages, stage_key)]'
"""A condition on rows with `stage_key` and `update` (from 1); `$ends` are numbers of completed updates."""
NOT_HELD = "coalesce(fate, '') NOT IN ('held', 'superseded')"
"""A condition on groups: a group that ran again counts once."""
NEWEST_FIRST = 'list_position($stages, stage_key), "update" DESC'
_NO_END = 2**31 - 1


def before(stage_key: str, num_updates: int, lineage: Sequence[Ancestor]) -> dict[str, Any]:
    """The parameters of BEFORE and NEWEST_FIRST. `num_updates`: completed updates of the stage. A stage in its own
    lineage, such as one that continues from its milestone, counts once, in its present state."""
    ends = {stage_key: num_updates}
    for stage, num_made in lineage:
        ends.setdefault(stage, _NO_END if num_made is None else num_made)
    return {"stages": list(ends), "ends": list(ends.values())}
