"""Work on the store that makes no asset: removing what nothing refers to any more."""

from dataclasses import asdict

import dagster as dg

from osworld_pipeline.runs import upkeep
from resources.state import StateResource


@dg.op(pool="upkeep")
def remove_garbage(context: dg.OpExecutionContext, state: StateResource) -> None:
    """Removes images and superseded files that no row refers to, after a grace; safe beside writers."""
    context.log.info("collected: %s", asdict(upkeep.collect_garbage(state.dir())))


@dg.job(
    description="Removes images and superseded files that no row of the store or the tables refers to.",
    tags={"dagster/max_retries": "0"},
)
def collect_garbage() -> None:
    remove_garbage()
