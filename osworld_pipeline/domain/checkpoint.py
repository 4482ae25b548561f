"""A checkpoint: weights on disk with their parent and everything that made them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Stage(StrEnum):
    BASE = "base"
    SFT = "sft"
    FLYWHEEL = "flywheel"
    """A round of it; each is a checkpoint of its own."""
    GSPO_PHASE1 = "gspo_phase1"
    GSPO_PHASE2 = "gspo_phase2"


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    checkpoint_id: str
    """`<stage>-<12 hex>`: a digest of the recipe section, the parent and the data, so a rerun finds it again."""
    stage: Stage
    parent_id: str | None
    path: str
    """Folder in Hugging Face format, relative to the state folder, with optimizer.pt beside the weights."""
    num_updates: int
    recipe_digest: str
    data_digest: str
    weights_digest: str
    """SHA-256 of model.safetensors."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    run_ids: Mapping[str, str] = field(default_factory=dict)
