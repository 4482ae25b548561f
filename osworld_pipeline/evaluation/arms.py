"""Find checkpoints that differ only in seeds: they are runs of one arm."""

from collections.abc import Iterable, Mapping
from typing import Any

from osworld_pipeline.domain.checkpoint import Checkpoint
from osworld_pipeline.domain.digest import digest_json
from osworld_pipeline.recipes.learned import learned_by

SEED = "seed"
TASKS = "suite"
"""Its seed selects the tasks, not the training."""


def arms_of(checkpoints: Iterable[Checkpoint]) -> dict[str, str]:
    """The arm of each checkpoint: a digest of everything that its stages depend on except seeds, and of its updates. A
    checkpoint or ancestor whose card has no recipe enters the digest with its id.
    """
    known = {one.checkpoint_id: one for one in checkpoints}
    return {name: _arm(one, known) for name, one in known.items()}


def _arm(checkpoint: Checkpoint, known: Mapping[str, Checkpoint]) -> str:
    parts: list[Any] = []
    seen: set[str] = set()
    name: str | None = checkpoint.checkpoint_id
    while name is not None and name not in seen:
        seen.add(name)
        one = known.get(name)
        parts.append(name if one is None else _made_by(one))
        name = one.parent_id if one else None
    return digest_json(parts)


def _made_by(checkpoint: Checkpoint) -> Any:
    """What the stage of a checkpoint depends on except seeds and parent; its id if the card does not say."""
    try:
        params = learned_by(checkpoint.stage, checkpoint.recipe)
    except (KeyError, TypeError):  # no recipe, or one of an earlier version
        return checkpoint.checkpoint_id
    if not params:
        return checkpoint.checkpoint_id
    # The seed draws a share of the tasks, so other seeds select other demonstrations of the same data.
    is_drawn = params.get("sft", {}).get("task_share", 1.0) < 1.0
    return {
        "stage": str(checkpoint.stage),
        "num_updates": checkpoint.num_updates,
        "data": "" if is_drawn else checkpoint.data_digest,
        "params": {name: section if name == TASKS else _without_seeds(section) for name, section in params.items()},
    }


def _without_seeds(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_seeds(inner) for name, inner in value.items() if name != SEED}
    return value
