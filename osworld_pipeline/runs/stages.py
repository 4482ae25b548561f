"""Names of stages: a checkpoint's id is a digest of all that makes it, so a rerun finds what is already there."""

from typing import Any

from osworld_pipeline.domain.checkpoint import Stage
from osworld_pipeline.domain.digest import digest_json
from osworld_pipeline.recipes import Recipe

DIGEST_LENGTH = 12

SECTIONS: dict[Stage, tuple[str, ...]] = {
    Stage.BASE: ("model", "suite"),
    Stage.SFT: ("sft", "agent"),
    Stage.GSPO_PHASE1: ("gspo", "agent", "reward", "desktop"),
    Stage.GSPO_PHASE2: ("gspo", "agent", "reward", "desktop"),
}
"""What of a recipe a stage's weights depend on, beside the parent and the data."""

NOT_IN_DESKTOP = ("num_replicas",)
"""How many desktops work changes how long it takes, not what is learned."""


def stage_params(stage: Stage, recipe: Recipe) -> dict[str, Any]:
    """The sections of `recipe` that decide what `stage` makes; also its MLflow parameters."""
    dumped = recipe.model_dump(mode="json")
    params = {name: dict(dumped[name]) for name in SECTIONS[stage]}
    for name in NOT_IN_DESKTOP:
        params.get("desktop", {}).pop(name, None)
    other = {Stage.GSPO_PHASE1: "phase2", Stage.GSPO_PHASE2: "phase1"}.get(stage)
    if other is not None:
        params["gspo"].pop(other)
    return params


def stage_checkpoint_id(stage: Stage, recipe: Recipe, *, parent_id: str | None, data_digest: str) -> str:
    """`<stage>-<12 hex>`."""
    digest = digest_json({"params": stage_params(stage, recipe), "parent": parent_id, "data": data_digest})
    return f"{stage}-{digest[:DIGEST_LENGTH]}"


def evaluation_key(recipe: Recipe, *, suite_digest: str) -> str:
    """Digest of all that makes two evaluations comparable, apart from the checkpoint."""
    dumped = recipe.model_dump(mode="json")
    desktop = {name: value for name, value in dumped["desktop"].items() if name not in NOT_IN_DESKTOP}
    parts = {"evaluation": dumped["evaluation"], "agent": dumped["agent"], "desktop": desktop, "suite": suite_digest}
    return digest_json(parts)[:DIGEST_LENGTH]
