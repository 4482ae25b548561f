"""Automatic compaction: a schedule that checks for small parts and cold images every hour. Runs also compact at their
end."""

import dagster as dg

from jobs.pipeline import compact_trajectories
from osworld_pipeline.errors import StoreError
from osworld_pipeline.runs.upkeep.upkeep import is_compaction_due
from resources.state import StateResource


@dg.schedule(
    job=compact_trajectories,
    cron_schedule="17 * * * *",
    execution_timezone="UTC",
    default_status=dg.DefaultScheduleStatus.RUNNING,
)
def compaction_schedule(context: dg.ScheduleEvaluationContext, state: StateResource) -> dg.RunRequest | dg.SkipReason:
    """Merges the small parts of the trajectory store if there are enough, and packs cold images; the work of a run is
    bounded."""
    try:
        is_due = is_compaction_due(state.dir())
    except StoreError as error:
        return dg.SkipReason(str(error))
    if is_due:
        return dg.RunRequest()
    return dg.SkipReason("there are few small parts, and no search for cold images is due")
