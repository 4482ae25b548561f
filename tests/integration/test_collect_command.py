"""`collect` and `evaluate` without a model of our own, from end to end on real desktops: the suite's oracles, and an
OpenAI-compatible endpoint."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from command_runs import LIMIT_S, SETTINGS, TOKEN, answer, asked, with_instance_settings

from osworld_pipeline.dialects import load_dialect

GIVE_UP = load_dialect("slime").format("Give up", {"action": "terminate", "status": "failure"})

pytestmark = [pytest.mark.slow, pytest.mark.desktop, pytest.mark.timeout(3 * LIMIT_S)]


@pytest.fixture
def here(tmp_path: Path) -> Path:
    return with_instance_settings(tmp_path)


@contextmanager
def giving_up() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """An endpoint whose model gives up every task. Yields its address and the requests that it received."""
    requests: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._reply({"data": [{"id": "giver"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requests.append({"token": self.headers["Authorization"], "model": body["model"]})
            self._reply({"choices": [{"message": {"content": GIVE_UP}, "finish_reason": "stop"}]})

        def log_message(self, format: str, *args: Any) -> None: ...

        def _reply(self, body: dict[str, Any]) -> None:
            data = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1#giver", requests
    finally:
        server.shutdown()
        server.server_close()


def test_endpoint_is_evaluated_on_chosen_tasks_and_seeds_with_the_token_of_the_engine(here: Path) -> None:
    with giving_up() as (address, requests):
        result = answer(here, "evaluate", *SETTINGS, "--checkpoint", address, "--max-tasks", "1", "--seeds", "3,4")
        num_asked = len(requests)
        again = answer(here, "evaluate", *SETTINGS, "--checkpoint", address, "--max-tasks", "1", "--seeds", "3,4")
    assert again == result
    assert len(requests) == num_asked, "what is finished is not run again"
    assert {tuple(one.items()) for one in requests} == {(("token", f"Bearer {TOKEN}"), ("model", "giver"))}
    assert [(row["seed"], row["success"], row["outcome"], row["engine"]) for row in result["results"]] == [
        (3, False, "failure", "openai"), (4, False, "failure", "openai"),
    ]  # fmt: skip
    assert (result["success_rate"], result["num_faults"]) == (0.0, 0)
    ranked = asked(here, "SELECT checkpoint_id, stage, count(*) FROM evals GROUP BY ALL")
    assert ranked == [(result["checkpoint"], "external", 2)]


def test_oracle_is_collected_once_and_its_successes_are_demonstrations_to_export(here: Path) -> None:
    options = ("collect", *SETTINGS, "--oracle", "--max-tasks", "2")
    first = answer(here, *options)
    assert (first["num_episodes"], first["num_success"], first["num_faults"]) == (2, 2, 0)
    before = asked(here, "SELECT episode_id, started_at FROM episodes")
    more = answer(here, *options, "--samples", "2")
    assert (more["num_episodes"], more["stage_key"]) == (4, first["stage_key"])
    assert set(before) < set(asked(here, "SELECT episode_id, started_at FROM episodes"))
    assert asked(here, "SELECT kind, count(*) FROM replay GROUP BY 1") == [("episode", 4)]
    exported = answer(here, "export", "slime", "out", "--online", "--where", "kind = 'episode'")
    assert exported["num_online"] == 4
