"""Requests generated from our own API documentation: none of them is answered with a server error."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from surface_server import TASK

FOLDER = Path(__file__).parent
MADE_UP = settings(
    max_examples=8, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("server")
    command = [sys.executable, str(FOLDER / "fake_server.py"), str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 30
        while not (folder / "ready.json").exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield json.loads((folder / "ready.json").read_text())["url"]
        assert process.poll() is None, "it still runs"
    finally:
        process.terminate()
        process.wait(20)


def test_no_request_is_answered_with_a_server_error(url: str) -> None:
    """The requests name a live episode, so that they do not only test unknown ids."""
    import schemathesis  # it takes longer than all other tests of this folder to import

    operations = [result.ok() for result in schemathesis.openapi.from_url(f"{url}/openapi.json").get_all_operations()]
    assert len(operations) > 20
    for operation in operations:
        if operation.path == "/v1/server/drain":  # it would end the server
            continue
        httpx.post(f"{url}/v1/server/cordon", json={"is_cordoned": False}).raise_for_status()
        opened = httpx.post(f"{url}/reset", json={"task_config": TASK}).raise_for_status().json()
        send_made_up(operation, opened["episode_id"])
        httpx.post(f"{url}/close", json={"episode_id": opened["episode_id"]})


def send_made_up(operation: Any, episode_id: str) -> None:
    """Sends requests that the documentation allows and, if there is a body or a query, requests that it forbids."""
    from schemathesis import GenerationMode

    modes = [GenerationMode.POSITIVE]
    if operation.body or operation.query:
        modes.append(GenerationMode.NEGATIVE)
    for mode in modes:

        @MADE_UP
        @given(case=operation.as_strategy(generation_mode=mode))
        def check(case: Any) -> None:
            send_to_live(case, episode_id)

        check()


def send_to_live(case: Any, episode_id: str) -> None:
    if "episode_id" in (case.path_parameters or {}):
        case.path_parameters["episode_id"] = episode_id
    if isinstance(case.body, dict):
        if isinstance(case.body.get("episode_id"), str):
            case.body["episode_id"] = episode_id
        if isinstance(case.body.get("pause"), int | float):
            case.body["pause"] = min(case.body["pause"], 0.01)
    answer = case.call(timeout=20)
    assert answer.status_code < 500, answer.text
    if answer.status_code >= 400:
        assert json.loads(answer.content)["error"], "a sentence says what was wrong"
