"""A checkpoint: weights on disk with their parent and origin."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, NamedTuple

from osworld_pipeline.domain.replay import TrainedRow
from osworld_pipeline.domain.stored import UTC, Stored


class Stage(StrEnum):
    BASE = "base"
    EXTERNAL = "external"
    """A checkpoint from outside this pipeline: a folder, a model of a hub, or an endpoint without local weights."""
    SFT = "sft"
    FLYWHEEL = "flywheel"
    """A round of the flywheel; each makes a checkpoint."""
    GSPO_PHASE1 = "gspo_phase1"
    GSPO_PHASE2 = "gspo_phase2"


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    checkpoint_id: Annotated[
        str,
        Stored(
            "`<stage>-<12 hex>`: a digest of the recipe's sections, the parent and the data, so that a rerun finds it "
            "again; for an external one, of its weights and config.json, or of an endpoint's address. A milestone "
            "has its number of updates appended: `-u0007`."
        ),
    ]
    stage: Annotated[Stage, Stored("base, external, sft, flywheel, gspo_phase1, gspo_phase2.")]
    parent_id: Annotated[
        str | None, Stored("The checkpoint that it was trained from; NULL for a base or an external one.")
    ]
    path: Annotated[
        str,
        Stored(
            "Folder in Hugging Face format, or an adapter with a reference to its base; below the state folder or "
            "absolute. For an endpoint its address, `URL#model`."
        ),
    ]
    num_updates: Annotated[int, Stored("Number of updates that produced these weights.", bits=32)]
    recipe_digest: Annotated[str, Stored("Digest of the recipe's sections that it depends on.")]
    data_digest: Annotated[str, Stored("Digest of its training data.")]
    weights_digest: Annotated[
        str,
        Stored(
            "SHA-256 of model.safetensors, or of the shards' names and digests; for an adapter, of its base, its "
            "factors and their scale together; empty for an endpoint."
        ),
    ]
    metrics: Annotated[Mapping[str, float], Stored("Metrics of the last update, by name.")] = field(
        default_factory=dict
    )
    run_ids: Annotated[Mapping[str, str], Stored("Runs in Dagster and MLflow, by system.")] = field(
        default_factory=dict
    )
    recipe: Mapping[str, Any] = field(default_factory=dict)
    """The resolved recipe of the run; empty if unknown."""
    code_version: Annotated[
        str,
        Stored(
            "Version of the program that made it: a git commit, or the distribution and its version; empty if unknown."
        ),
    ] = ""
    is_code_dirty: Annotated[
        bool | None, Stored("Its sources differed from that commit; NULL outside a git checkout.")
    ] = None
    licence: Annotated[
        str | None,
        Stored(
            "Licence of weights from elsewhere, by the model card in their folder; NULL if it names none, and for "
            "weights that were made here."
        ),
    ] = None
    row_ids: Annotated[
        tuple[str, ...],
        Stored("Rows of `replay` used for fine-tuning; those that joined groups are in `injections`."),
    ] = ()
    sources: tuple[TrainedRow, ...] = ()
    """The same rows, with their origin; empty in checkpoints older than this field."""
    saved_at: Annotated[float, Stored("When its stage wrote it; NULL before version 7.", UTC, name="saved_utc")] = 0.0
    """Unix time in whole milliseconds; 0 in checkpoints older than this field."""


class Ancestor(NamedTuple):
    """A stage that made a checkpoint or one of its ancestors."""

    stage_key: str
    num_updates: int | None = None
    """The number of the stage's updates that made a milestone. None: all of them."""

    @classmethod
    def parse(cls, checkpoint_id: str) -> "Ancestor":
        """The stage that made the checkpoint of this id."""
        stage_key, mark, number = checkpoint_id.rpartition("-u")
        is_milestone = bool(mark) and number.isascii() and number.isdecimal()
        return cls(stage_key, int(number)) if is_milestone else cls(checkpoint_id)


def milestone_id(stage_key: str, num_updates: int) -> str:
    """The id of the checkpoint that a stage keeps after this number of updates."""
    return f"{stage_key}-u{num_updates:04d}"
