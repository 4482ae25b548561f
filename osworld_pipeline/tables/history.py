"""What an update of a stage may look back on: the stage's updates before it, and what its parents were made by."""

from collections.abc import Sequence
from typing import Any

from osworld_pipeline.domain.checkpoint import Ancestor

BEFORE = 'list_contains($stages, stage_key) AND coalesce("update", 0) < $ends[list_position($stages, stage_key)]'
"""A condition on rows with `stage_key` and `update`."""
NOT_HELD = "coalesce(fate, '') <> 'held'"
"""A condition on groups: one that was held ran again, and counts once."""
NEWEST_FIRST = 'list_position($stages, stage_key), "update" DESC'
_NO_END = 2**31 - 1


def before(stage_key: str, update: int, lineage: Sequence[Ancestor]) -> dict[str, Any]:
    """The parameters of both. A stage that is in its own lineage, as one that goes on from its milestone, counts once,
    as it is now."""
    ends = {stage_key: update}
    for stage, num_updates in lineage:
        ends.setdefault(stage, _NO_END if num_updates is None else num_updates)
    return {"stages": list(ends), "ends": list(ends.values())}
