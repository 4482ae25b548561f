"""Failed runs: their first reason in one sentence, and a sensor that sends it to a webhook."""

import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import dagster as dg

from resources.tracking import TrackingResource

WEBHOOK = "OSWORLD_FAILURE_WEBHOOK"
TIMEOUT_S = 10.0
OWN_ERRORS = "osworld_pipeline.errors."


def reason_of(event: dg.DagsterEvent) -> str:
    """The reason of a step's failure: the step, and the description of a dg.Failure or else the message of the root
    error."""
    data = event.step_failure_data
    error = data.error
    while error is not None and error.cause is not None:
        error = error.cause
    described = data.user_failure_data.description if data.user_failure_data else None
    # Dagster puts the class before the message; for our own errors the message is enough.
    message = error.message.strip().removeprefix(f"{OWN_ERRORS}{error.cls_name}: ") if error else ""
    return f"{event.step_key}: {described or message or 'no reason given'}"


@dg.run_failure_sensor(default_status=dg.DefaultSensorStatus.RUNNING)
def failed_runs(context: dg.RunFailureSensorContext, tracking: TrackingResource) -> dg.SkipReason | None:
    """Posts each failed run as JSON ({"text", "job", "run_id", "url", "reasons"}) to the address in the environment
    variable OSWORLD_FAILURE_WEBHOOK; this includes runs whose process was killed. Chat programs show `text`."""
    address = os.environ.get(WEBHOOK)
    if not address:
        return dg.SkipReason(f"no webhook: {WEBHOOK} is not set")
    letter = letter_of(context, base_url=tracking.dagster_url)
    problem = post(address, letter)
    if problem is not None:
        # The address may contain a secret: log only its host.
        host = urlsplit(address).hostname
        context.log.error(f"{host} did not confirm the report of run {letter['run_id']}: {problem}")
    return None


def letter_of(context: dg.RunFailureSensorContext, *, base_url: str) -> dict[str, Any]:
    run = context.dagster_run
    reasons = [reason_of(event) for event in context.get_step_failure_events()] or [context.failure_event.message or ""]
    url = f"{base_url.rstrip('/')}/runs/{run.run_id}"
    partition = f" of {run.tags['dagster/partition']}" if "dagster/partition" in run.tags else ""
    text = f"{run.job_name}{partition} failed: {reasons[0]} ({url})"
    return {"text": text, "job": run.job_name, "run_id": run.run_id, "url": url, "reasons": reasons}


def post(address: str, letter: Mapping[str, Any]) -> str | None:
    """Sends the report. Returns the reason of a failure, or None. There is no retry, because the request may have
    arrived."""
    import httpx

    try:
        response = httpx.post(address, json=letter, timeout=TIMEOUT_S)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return type(error).__name__
    return None if response.is_success else f"it responded with status {response.status_code}"
