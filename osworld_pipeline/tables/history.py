"""What an update of a stage may look back on: the stage's updates before it, and what its parents were made by."""

from collections.abc import Sequence
from typing import Any

from osworld_pipeline.domain.checkpoint import Ancestor

BEFORE = 'list_contains($stages, stage_key) AND coalesce("update", 1) <= $ends[list_position($stages, stage_key)]'
"""A condition on rows with `stage_key` and `update` (from 1); `$ends` are numbers of updates that are done."""
NOT_HELD = "coalesce(fate, '') NOT IN ('held', 'superseded')"
"""A condition on groups: one that ran again counts once."""
NEWEST_FIRST = 'list_position($stages, stage_key), "update" DESC'
_NO_END = 2**31 - 1


def before(stage_key: str, num_updates: int, lineage: Sequence[Ancestor]) -> dict[str, Any]:
    """The parameters of both. `num_updates`: of the stage, that are done. A stage that is in its own lineage, as one
    that goes on from its milestone, counts once, as it is now."""
    ends = {stage_key: num_updates}
    for stage, num_made in lineage:
        ends.setdefault(stage, _NO_END if num_made is None else num_made)
    return {"stages": list(ends), "ends": list(ends.values())}
