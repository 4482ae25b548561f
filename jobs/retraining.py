"""Re-training of the champion: a schedule, and a sensor for new successes or new data. Both are off by default."""

import os
from collections.abc import Sequence
from typing import Any

import dagster as dg

from assets.keys import key_of
from jobs.pipeline import RANK, evaluate, retrain
from jobs.sensors import resources_of
from jobs.unfinished import EVALUATIONS, num_evaluating, num_training
from osworld_pipeline.domain.checkpoint import Checkpoint
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import RecipeError, TableError
from osworld_pipeline.recipes import Recipe
from osworld_pipeline.runs.checkpoints.ids import read_checkpoint
from osworld_pipeline.runs.checkpoints.registry import all_checkpoints
from osworld_pipeline.runs.flywheel.retraining import (
    RETRAINING_TAG,
    Retraining,
    decide,
    end_that_is_there,
    last_look,
    new_data_since,
)
from resources.state import RecipeResource, StateResource

CRON_VARIABLE = "OSWORLD_RETRAINING_CRON"
DEFAULT_CRON = "0 3 * * *"
EVERY_S = 300
NUM_REMEMBERED = 100
"""Number of past re-trainings to consider."""
DATA = ("replay_buffer", "train_tasks")


def build_retraining_schedule(cron: str) -> dg.ScheduleDefinition:
    @dg.schedule(
        job=retrain, cron_schedule=cron, execution_timezone="UTC", default_status=dg.DefaultScheduleStatus.STOPPED
    )
    def retraining_schedule(
        context: dg.ScheduleEvaluationContext, state: StateResource, recipe: RecipeResource
    ) -> dg.RunRequest | dg.SkipReason:
        """Re-trains the champion, even without new data. Not while a training or an evaluation is unfinished; and after
        as many re-trainings without a new champion as retraining.patience, only if there is new data."""
        return ask(context.instance, state, recipe, is_scheduled=True)

    return retraining_schedule


retraining_schedule = build_retraining_schedule(os.environ.get(CRON_VARIABLE) or DEFAULT_CRON)


@dg.sensor(job=retrain, minimum_interval_seconds=EVERY_S, default_status=dg.DefaultSensorStatus.STOPPED)
def retraining_is_due(
    context: dg.SensorEvaluationContext, state: StateResource, recipe: RecipeResource
) -> dg.RunRequest | dg.SkipReason:
    """Re-trains the champion when there are enough new successes (retraining.min_new_successes), or new data. Waits for
    unfinished work, and applies retraining.patience, as retraining_schedule does."""
    return ask(context.instance, state, recipe, is_scheduled=False)


def ask(
    instance: dg.DagsterInstance, state: StateResource, recipe: RecipeResource, *, is_scheduled: bool
) -> dg.RunRequest | dg.SkipReason:
    """Requests a re-training of the champion with its own recipe, or returns the reason not to."""
    folder = state.dir()
    champion_id = _champion_id(instance)
    if champion_id is None:
        return dg.SkipReason("there is no champion yet: it is set when a trained checkpoint has been evaluated")
    champion = read_checkpoint(folder, champion_id)
    if champion is None:
        return dg.SkipReason(f"the champion {champion_id} is not in {folder.root}: restore it, or run the job {RANK}")
    history = past_retrainings(instance)
    waiting = _waits_for(instance, all_checkpoints(folder), history)
    if waiting:
        return dg.SkipReason(waiting)
    resources = resources_of(champion.run_ids.get("dagster", ""), instance)
    source = RecipeResource(**resources["recipe"]["config"]) if "recipe" in resources else recipe
    try:
        settings = source.load()
    except RecipeError as error:
        return dg.SkipReason(f"the recipe of the champion {champion_id} cannot be loaded: {error}")
    new_data = new_data_since(
        folder,
        champion_id,
        history,
        threshold=settings.replay.threshold,
        is_data_new=_is_data_new(instance, since=last_look(folder, champion_id, history)),
    )
    decision = decide(settings.retraining, champion_id, history, new_data, is_scheduled=is_scheduled)
    if not decision.is_due:
        return dg.SkipReason(decision.reason)
    if end := _end_that_is_there(folder, settings, champion):
        return dg.SkipReason(
            f"{champion_id} was already re-trained with this recipe and data, to {end}: no training is left "
            "until the data change; launch it with other settings (another seed, more updates)"
        )
    return _request(champion, resources, state, history, reason=decision.reason)


def _end_that_is_there(state: StateDir, recipe: Recipe, champion: Checkpoint) -> str:
    """The id of the existing final checkpoint; empty if there is something to train, or tables are missing, which the
    run reports."""
    try:
        end = end_that_is_there(state, recipe, champion)
    except TableError:
        return ""
    return end.checkpoint_id if end else ""


def past_retrainings(instance: dg.DagsterInstance) -> list[Retraining]:
    """The re-trainings in Dagster's history, the newest first, including failed ones."""
    records = instance.get_run_records(dg.RunsFilter(job_name=retrain.name), limit=NUM_REMEMBERED)
    found = [
        Retraining(
            run_id=record.dagster_run.run_id,
            champion_id=record.dagster_run.tags[RETRAINING_TAG],
            began_at=record.start_time or record.create_timestamp.timestamp(),
        )
        for record in records
        if RETRAINING_TAG in record.dagster_run.tags
    ]
    return sorted(found, key=lambda one: one.began_at, reverse=True)


def _request(
    champion: Checkpoint,
    resources: dict[str, Any],
    state: StateResource,
    history: Sequence[Retraining],
    *,
    reason: str,
) -> dg.RunRequest:
    """The run request; its key prevents a second run if the sensor ticks again before the run exists."""
    configured = {
        **resources,
        "state": {"config": state.as_config()},
        "start": {"config": {"checkpoint": champion.checkpoint_id}},
    }
    return dg.RunRequest(
        run_key=f"{champion.checkpoint_id}/{history[0].run_id if history else 'first'}",
        run_config={"resources": configured},
        tags={RETRAINING_TAG: champion.checkpoint_id, "osworld/reason": reason},
    )


def _champion_id(instance: dg.DagsterInstance) -> str | None:
    event = instance.get_latest_materialization_event(key_of("champion"))
    if event is None or event.asset_materialization is None:
        return None
    checkpoint_id = str(event.asset_materialization.metadata["checkpoint_id"].value)
    return None if checkpoint_id == "none" else checkpoint_id


def _waits_for(instance: dg.DagsterInstance, checkpoints: Sequence[Checkpoint], history: Sequence[Retraining]) -> str:
    """Running work that trains, or that may change the champion; empty if there is none."""
    if running := num_training(instance):
        return f"{running} trainings have not ended"
    if running := num_evaluating(instance):
        return f"{running} evaluations have not ended"
    unjudged = _unjudged(instance, checkpoints, history)
    if unjudged:
        return f"{unjudged[0]}, made by the last re-training, is not evaluated yet: the sensor new_checkpoints does it"
    evaluated = instance.get_latest_materialization_event(EVALUATIONS)
    ranked = instance.get_latest_materialization_event(key_of("champion"))
    if evaluated is not None and ranked is not None and evaluated.timestamp > ranked.timestamp:
        return "the last evaluation is not ranked yet: the sensor new_evaluations does it"
    return ""


def _unjudged(
    instance: dg.DagsterInstance, checkpoints: Sequence[Checkpoint], history: Sequence[Retraining]
) -> list[str]:
    """Checkpoints of the last re-training that have neither an evaluation nor a run that evaluates them. A failed run
    counts, because it needs manual action."""
    made = [one.checkpoint_id for one in checkpoints if history and one.run_ids.get("dagster") == history[0].run_id]
    judged = {key.split("|")[0] for key in instance.get_materialized_partitions(EVALUATIONS)} if made else set()
    return [
        checkpoint_id
        for checkpoint_id in made
        if checkpoint_id not in judged
        and not instance.get_runs_count(
            dg.RunsFilter(job_name=evaluate.name, tags={"osworld/checkpoint": checkpoint_id})
        )
    ]


def _is_data_new(instance: dg.DagsterInstance, *, since: float) -> bool:
    """Whether a table's data version has changed since then; a table that did not exist then is ignored."""
    for table in DATA:
        latest = _data_version(instance, dg.AssetRecordsFilter(asset_key=key_of(table)))
        before = _data_version(instance, dg.AssetRecordsFilter(asset_key=key_of(table), before_timestamp=since))
        if before is not None and latest != before:
            return True
    return False


def _data_version(instance: dg.DagsterInstance, wanted: dg.AssetRecordsFilter) -> str | None:
    records = instance.fetch_materializations(wanted, limit=1).records
    made = records[0].asset_materialization if records else None
    return (made.tags or {}).get("dagster/data_version") if made is not None else None
