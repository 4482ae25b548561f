"""Verified replay: the rewards of the demonstrations of the replay buffer when they are executed again."""

from typing import Any

import dagster as dg

from assets.keys import PREFIX, key_of
from assets.metadata import NUM_SHOWN, column_schema
from assets.retries import FAULT_RETRIES, only_after_faults
from osworld_pipeline.columns import REPLAY_VERIFICATIONS
from osworld_pipeline.runs.code_version import code_version
from osworld_pipeline.runs.verify_replay.job import VerificationJob
from osworld_pipeline.runs.verify_replay.summary import (
    MODULES,
    VerificationSummary,
    read_summary,
    settled_summary,
    verification_key,
)
from osworld_pipeline.tables.preview import markdown_table
from resources.desktops import DesktopsResource
from resources.launcher import Launcher
from resources.progress import ProgressResource
from resources.state import RecipeResource, StateResource

GROUP = "tables"


@dg.asset(
    key_prefix=PREFIX,
    group_name=GROUP,
    kinds={"x11", "parquet"},
    pool="desktops",
    deps=[key_of("replay_buffer"), key_of("train_tasks")],
    code_version=code_version(*MODULES),
    retry_policy=FAULT_RETRIES,
)
@only_after_faults
def verified_replay(
    context: dg.AssetExecutionContext,
    state: StateResource,
    recipe: RecipeResource,
    desktops: DesktopsResource,
    launcher: Launcher,
    progress: ProgressResource,
) -> dg.MaterializeResult:
    """Demonstrations are executed again on real desktops and graded; known results are not repeated."""
    settings, folder = recipe.load(), state.dir()
    if settings.replay.verify == "none":
        return dg.MaterializeResult(metadata={"skipped": 'the recipe has replay.verify = "none"'})
    key = verification_key(folder, settings, desktops=desktops.identity(settings))
    summary = settled_summary(folder, key)
    if summary is None:
        with desktops.serve(folder, settings, run_id=context.run.run_id) as servers:
            job = VerificationJob(recipe=settings, state_root=folder.root, servers=servers, key=key)
            launcher.launch(context, "verify_replay", job, progress.listener(context, "verified replay"), state=folder)
        summary = read_summary(folder)
    assert summary is not None, "the verification succeeded without a summary"
    return dg.MaterializeResult(metadata=summary_metadata(summary), data_version=dg.DataVersion(summary.digest))


def summary_metadata(summary: VerificationSummary) -> dict[str, Any]:
    failed = [
        (one.task_id, one.row_id, one.source, ", ".join(f"{reward:g}" for reward in one.earned), one.error)
        for one in summary.failed[:NUM_SHOWN]
    ]
    reasons = [(reason, len(rows), rows[0]) for reason, rows in summary.unplayable.items()]
    return {
        "dagster/row_count": summary.num_verified + summary.num_failed,
        "dagster/column_schema": column_schema(REPLAY_VERIFICATIONS),
        "rows": summary.num_rows,
        "demonstrations": summary.num_demonstrations,
        "chosen": summary.num_chosen,
        "verified": summary.num_verified,
        "failed": summary.num_failed,
        "without a verdict": summary.num_open,
        "faults": summary.num_faults,
        "not verifiable": summary.num_unplayable,
        "failed ones": dg.MetadataValue.md(markdown_table(("task", "row", "source", "earned", "refused"), failed)),
        "reasons": dg.MetadataValue.md(markdown_table(("reason", "rows", "the first"), reasons)),
        "coverage": summary.coverage,
        "verified coverage": summary.verified_coverage,
    }


ASSETS = [verified_replay]
