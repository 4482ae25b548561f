"""The start of training: the asset upstream, or an existing checkpoint, as in re-training and `osworld-pipeline train
--from`."""

import dagster as dg
from pydantic import Field, field_validator

from osworld_pipeline.domain.checkpoint import Checkpoint, Stage
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.recipes import Recipe
from osworld_pipeline.runs.budget import UNLIMITED, Budget, read_spent, whole_budget
from osworld_pipeline.runs.checkpoints.endpoints import is_address
from osworld_pipeline.runs.checkpoints.external import require_unchanged
from osworld_pipeline.runs.checkpoints.registry import register_checkpoint
from resources.tracking import TrackingResource

CHAMPION = "champion"
TRAINED_STAGES = tuple(map(str, (Stage.SFT, Stage.FLYWHEEL, Stage.GSPO_PHASE1, Stage.GSPO_PHASE2)))
"""The stages in the order in which they train."""


class StartResource(dg.ConfigurableResource):
    """The checkpoint that training starts from, if not the asset upstream."""

    checkpoint: str = Field(
        default="",
        description="Empty: each stage trains the checkpoint of the asset upstream. `champion`, or the id of a "
        "checkpoint: `stage` trains this checkpoint, and each later stage trains the result of the stage before it.",
    )
    stage: str = Field(
        default=str(Stage.FLYWHEEL),
        description="The stage that trains `checkpoint`: sft, flywheel, gspo_phase1 or gspo_phase2.",
    )
    has_budget: bool = Field(
        default=True,
        description="Whether training from `checkpoint` has the recipe's budget (retraining.max_wall_s etc.).",
    )

    @field_validator("stage")
    @classmethod
    def _is_trained(cls, stage: str) -> str:
        if stage not in TRAINED_STAGES:
            raise ValueError(f"no stage '{stage}' trains a checkpoint; there are: {', '.join(TRAINED_STAGES)}")
        return stage

    @property
    def is_given(self) -> bool:
        return bool(self.checkpoint)

    def is_start_of(self, stage: Stage) -> bool:
        """Whether `stage` trains `checkpoint` instead of the asset upstream."""
        return self.is_given and self.stage == stage

    def resolve(self, state: StateDir, tracking: TrackingResource) -> Checkpoint:
        """The checkpoint to start from.

        Raises:
            dg.Failure: there is no champion, or it has no weights here.
            TableError: there is no checkpoint of that id.
            StoreError: it is external, and its folder has changed since it was added.
            TrackingError: MLflow cannot return the champion.
        """
        assert self.is_given, "without a checkpoint, training starts from the asset upstream"
        checkpoint_id = tracking.champion(state) if self.checkpoint == CHAMPION else self.checkpoint
        if checkpoint_id is None:
            raise dg.Failure(
                "there is no champion to train further: evaluate a trained checkpoint and run the job rank, or name a "
                "checkpoint in the resource start",
                allow_retries=False,
            )
        checkpoint = register_checkpoint(state, checkpoint_id)
        if is_address(checkpoint.path):
            raise dg.Failure(
                f"{checkpoint_id} is an endpoint ({checkpoint.path}) and has no weights to train: name a checkpoint "
                "with weights in the resource start",
                allow_retries=False,
            )
        if checkpoint.stage is Stage.EXTERNAL:
            require_unchanged(checkpoint_id, state.root / checkpoint.path)
        return checkpoint

    def budget_left(self, context: dg.AssetExecutionContext, recipe: Recipe, state: StateDir) -> Budget:
        """The remaining budget of this Dagster run; unlimited if it has none. Raises TableError."""
        if not self.is_given or not self.has_budget:
            return UNLIMITED
        record = context.instance.get_run_record_by_id(context.run.run_id)
        assert record is not None, "a running run has a record"
        began_at = record.start_time or record.create_timestamp.timestamp()
        return whole_budget(recipe.retraining, began_at=began_at).less(read_spent(state, context.run.run_id))
