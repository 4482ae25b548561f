"""Sensors: they start evaluations of every new checkpoint, including milestones of a running training, and then the
leaderboard."""

from collections.abc import Iterator, Sequence
from typing import Any

import dagster as dg

from assets.evaluations import CHECKPOINTS
from jobs.pipeline import evaluate, rank
from jobs.unfinished import EVALUATIONS, num_evaluating
from osworld_pipeline.domain.checkpoint import Checkpoint
from osworld_pipeline.errors import RecipeError
from osworld_pipeline.runs.checkpoints.registry import all_checkpoints
from resources.state import RecipeResource, StateResource

EVERY_S = 30
PASSED_ON = ("state", "recipe", "desktops", "engine", "launcher", "tracking")


@dg.sensor(job=evaluate, minimum_interval_seconds=EVERY_S, default_status=dg.DefaultSensorStatus.RUNNING)
def new_checkpoints(
    context: dg.SensorEvaluationContext, state: StateResource, recipe: RecipeResource
) -> dg.SensorResult | dg.SkipReason:
    """Adds each checkpoint as a partition and requests its evaluation on the suites of its training recipe
    (evaluation.suites). Existing evaluations, however they were started, are not repeated."""
    folder = state.dir()
    checkpoints = all_checkpoints(folder)
    registered = set(context.instance.get_dynamic_partitions(str(CHECKPOINTS.name)))
    done = context.instance.get_materialized_partitions(EVALUATIONS)
    requests: list[dg.RunRequest] = []
    for checkpoint in checkpoints:
        try:
            wanted = list(requests_of(checkpoint, context.instance, state=state, recipe=recipe))
        except RecipeError as error:
            context.log.warning(
                f"{checkpoint.checkpoint_id} is not evaluated automatically: its recipe cannot be loaded ({error})"
            )
        else:
            requests += [request for request in wanted if request.partition_key not in done]
    unknown = [one.checkpoint_id for one in checkpoints if one.checkpoint_id not in registered]
    if not requests and not unknown:
        return dg.SkipReason(f"all {len(checkpoints)} checkpoints are known and evaluated")
    return dg.SensorResult(
        run_requests=requests,
        dynamic_partitions_requests=[CHECKPOINTS.build_add_request(unknown)] if unknown else [],
    )


def requests_of(
    checkpoint: Checkpoint, instance: dg.DagsterInstance, *, state: StateResource, recipe: RecipeResource
) -> Iterator[dg.RunRequest]:
    """One request for each suite. Its key makes Dagster start it only once: a failed one needs manual action."""
    resources = resources_of(checkpoint.run_ids.get("dagster", ""), instance)
    source = RecipeResource(**resources["recipe"]["config"]) if "recipe" in resources else recipe
    for suite in source.load().evaluation.suites:
        yield dg.RunRequest(
            run_key=f"{checkpoint.checkpoint_id}/{suite}",
            partition_key=dg.MultiPartitionKey({"checkpoint": checkpoint.checkpoint_id, "suite": suite}),
            run_config={"resources": {**resources, "state": {"config": state.as_config()}}},
            tags={"osworld/checkpoint": checkpoint.checkpoint_id, "osworld/suite": suite},
        )


def resources_of(run_id: str, instance: dg.DagsterInstance) -> dict[str, Any]:
    """The configuration of a run's resources; empty if Dagster no longer has the run."""
    run = instance.get_run_by_id(run_id)
    configured: Any = run.run_config.get("resources", {}) if run is not None else {}
    return {name: configured[name] for name in PASSED_ON if name in configured}


@dg.sensor(job=rank, minimum_interval_seconds=EVERY_S, default_status=dg.DefaultSensorStatus.RUNNING)
def new_evaluations(context: dg.SensorEvaluationContext) -> dg.RunRequest | dg.SkipReason:
    """Updates the ranking with the recipe of the last evaluation, when no other is running or queued."""
    found: Sequence[dg.EventLogRecord] = context.instance.fetch_materializations(EVALUATIONS, limit=1).records
    if not found:
        return dg.SkipReason("nothing has been evaluated yet")
    latest = str(found[0].storage_id)
    if latest == context.cursor:
        return dg.SkipReason("nothing has been evaluated since the last time")
    running = num_evaluating(context.instance)
    if running:
        return dg.SkipReason(f"{running} evaluations have not ended")
    context.update_cursor(latest)
    resources = resources_of(found[0].run_id, context.instance)
    of_rank = {name: resources[name] for name in ("state", "recipe", "tracking") if name in resources}
    return dg.RunRequest(run_key=latest, run_config={"resources": of_rank})
