"""Where the training assets begin: at the asset upstream, or at a checkpoint that is there already, as re-training
does; what begins so has the recipe's budget."""

import dagster as dg
from pydantic import Field

from osworld_pipeline.domain.checkpoint import Checkpoint, Stage
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.recipes import Recipe
from osworld_pipeline.runs.budget import UNLIMITED, Budget, read_spent, whole_budget
from osworld_pipeline.runs.endpoints import is_address
from osworld_pipeline.runs.external import require_unchanged
from osworld_pipeline.runs.registered import register_checkpoint
from resources.tracking import TrackingResource

CHAMPION = "champion"


class StartResource(dg.ConfigurableResource):
    """What the flywheel goes on from."""

    checkpoint: str = Field(
        default="",
        description="Empty: the SFT checkpoint. `champion`, or the id of a checkpoint: the flywheel and the GSPO "
        "phases train that further, within the recipe's budget (retraining.max_wall_s and its kin).",
    )

    @property
    def is_retraining(self) -> bool:
        return bool(self.checkpoint)

    def resolve(self, state: StateDir, tracking: TrackingResource) -> Checkpoint:
        """The checkpoint that a re-training begins with.

        Raises:
            dg.Failure: there is no champion, or it has no weights here.
            TableError: there is no checkpoint of that id.
            StoreError: it was made elsewhere, and its folder has changed since it was added.
            TrackingError: MLflow cannot be asked for the champion.
        """
        assert self.is_retraining, "a run that is no re-training begins with the asset upstream"
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
                f"{checkpoint_id} is an endpoint ({checkpoint.path}) and has no weights that could be trained: name a "
                "checkpoint with weights in the resource start",
                allow_retries=False,
            )
        if checkpoint.stage is Stage.EXTERNAL:
            require_unchanged(checkpoint_id, state.root / checkpoint.path)
        return checkpoint

    def budget_left(self, context: dg.AssetExecutionContext, recipe: Recipe, state: StateDir) -> Budget:
        """Of this Dagster run; without limits where it is no re-training. Raises TableError."""
        if not self.is_retraining:
            return UNLIMITED
        record = context.instance.get_run_record_by_id(context.run.run_id)
        assert record is not None, "a run that is executed has a record"
        began_at = record.start_time or record.create_timestamp.timestamp()
        return whole_budget(recipe.retraining, began_at=began_at).less(read_spent(state, context.run.run_id))
