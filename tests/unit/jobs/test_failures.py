"""A failed run is reported once, in one sentence, to the configured receiver; a receiver that fails causes no error."""

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import dagster as dg
import pytest

from jobs.failures import WEBHOOK, failed_runs
from osworld_pipeline.errors import EnvServerError
from resources.tracking import TrackingResource


class Receiver:
    def __init__(self, status: int = 200) -> None:
        self.letters: list[dict[str, Any]] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                receiver.letters.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(status)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_port}/hook/of-a-secret"
        Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.close()


@dg.op
def broken() -> None:
    raise EnvServerError("the env server at http://127.0.0.1:8070 does not answer: start it")


@dg.job
def breaks() -> None:
    broken()


def run_sensor(*, partition: str | None = None) -> tuple[Any, str]:
    """The result of the sensor for a failed run, and the run's id."""
    with dg.DagsterInstance.ephemeral() as instance:
        tags = {"dagster/partition": partition} if partition else {}
        result = breaks.execute_in_process(instance=instance, raise_on_error=False, tags=tags)
        event = next(event for event in result.all_events if event.event_type == dg.DagsterEventType.PIPELINE_FAILURE)
        context = dg.build_run_status_sensor_context(
            sensor_name="failed_runs",
            dagster_event=event,
            dagster_instance=instance,
            dagster_run=result.dagster_run,
            resources={"tracking": TrackingResource(dagster_url="http://lab:3000/")},
        )
        return failed_runs(context.for_run_failure()), result.run_id


def test_a_failed_run_is_reported_with_its_first_reason_and_a_link(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(WEBHOOK, receiver.address)
    _, run_id = run_sensor(partition="sft-1|heldout")
    reason = "broken: the env server at http://127.0.0.1:8070 does not answer: start it"
    url = f"http://lab:3000/runs/{run_id}"
    assert receiver.letters == [
        {
            "text": f"breaks of sft-1|heldout failed: {reason} ({url})",
            "job": "breaks",
            "run_id": run_id,
            "url": url,
            "reasons": [reason],
        }
    ]


def test_without_an_address_nothing_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(WEBHOOK, raising=False)
    reported, _ = run_sensor()
    assert isinstance(reported, dg.SkipReason)


@pytest.mark.parametrize(("status", "problem"), [(500, "it responded with status 500"), (None, "ConnectError")])
def test_a_receiver_that_fails_is_logged_without_its_secret(
    status: int | None, problem: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    receiver = Receiver(status or 200)
    monkeypatch.setenv(WEBHOOK, receiver.address)
    if status is None:
        receiver.close()
    run_sensor()
    said = capfd.readouterr().err
    assert "127.0.0.1 did not confirm the report of run" in said
    assert problem in said
    assert "of-a-secret" not in said
