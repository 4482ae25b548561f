"""Upkeep of the trajectory store: its small parts merged into large sorted files."""

from dataclasses import asdict

import dagster as dg

from assets.keys import PREFIX, key_of
from osworld_pipeline.remote.status import push_after
from osworld_pipeline.runs.code_version import code_version
from osworld_pipeline.runs.upkeep.upkeep import compact_store
from osworld_pipeline.store.merging import RUN_BUDGET_BYTES
from resources.state import StateResource

GROUP = "upkeep"


@dg.asset(
    key_prefix=PREFIX,
    group_name=GROUP,
    kinds={"parquet"},
    pool="upkeep",
    deps=[key_of(name) for name in ("gspo_phase2_checkpoint", "evaluations", "verified_replay")],
    code_version=code_version("osworld_pipeline.runs.upkeep.upkeep", "osworld_pipeline.store"),
)
def compacted_trajectories(context: dg.AssetExecutionContext, state: StateResource) -> dg.MaterializeResult:
    """Small parts of episodes, steps and groups become few large files; concurrent readers and writers are safe. The
    work of one materialization is bounded; the next one does the rest."""
    folder = state.dir()
    done = compact_store(folder, budget_bytes=RUN_BUDGET_BYTES)
    push_after(folder, state.remote, context.log.warning)
    return dg.MaterializeResult(metadata=asdict(done))


ASSETS = [compacted_trajectories]
