"""`evaluate` and `collect` from end to end on real desktops: a folder from elsewhere, an OpenAI-compatible endpoint,
and the suite's oracles."""

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from checkpoint_samples import make_checkpoint
from s3_server import BUCKET, serve_s3

from osworld_pipeline.agent.dialects import load_dialect
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.recipes import load_recipe
from osworld_pipeline.runs.stages import CARD, checkpoint_card, recipe_suite
from osworld_pipeline.tables.catalog import rebuild_catalog
from osworld_pipeline.tables.checkpoints import upsert_checkpoint
from osworld_pipeline.tables.query import run_query
from osworld_pipeline.training.weights_digest import weights_digest

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = ("--recipe", "smoke", "--set", "agent.max_response_tokens=8")
TOKEN = "the-endpoints-token"
GIVE_UP = load_dialect("slime").format("Give up", {"action": "terminate", "status": "failure"})
LIMIT_S = 900

pytestmark = [pytest.mark.slow, pytest.mark.desktop, pytest.mark.timeout(3 * LIMIT_S)]


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder with an instance's settings, where a state may grow."""
    shutil.copy(ROOT / "dagster.yaml", tmp_path)
    return tmp_path


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "osworld_pipeline.cli", *arguments],
        cwd=folder,
        env={**os.environ, "DAGSTER_HOME": str(folder), "ENGINE_TOKEN": TOKEN, "COLUMNS": "400"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


def answer(folder: Path, *arguments: str) -> Any:
    done = run(folder, *arguments, "--json")
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def asked(folder: Path, sql: str) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in run_query(StateDir(folder / "var"), sql).rows]


@contextmanager
def giving_up() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """An endpoint whose model gives every task up; its address, and what it was asked."""
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


def test_folder_from_elsewhere_is_evaluated_once_and_refused_when_it_has_changed(here: Path, tiny_folder: Path) -> None:
    model = shutil.copytree(tiny_folder, here / "model")
    options = ("evaluate", *SETTINGS, "--set", "evaluation.max_turns=1", "--checkpoint", str(model))
    result = answer(here, *options, "--output", str(here / "result.json"))
    assert json.loads((here / "result.json").read_text()) == result
    heldout = [item.task.task_id for item in recipe_suite(load_recipe("smoke")).heldout]
    assert (result["tasks"], result["max_turns"], result["num_valid"]) == (heldout, 1, len(heldout))
    assert [row["task_id"] for row in result["results"]] == heldout
    before = asked(here, "SELECT episode_id, started_at FROM evals WHERE stage = 'external' ORDER BY 1")
    assert len(before) == len(heldout)
    assert answer(here, *options) == result
    assert asked(here, "SELECT episode_id, started_at FROM evals WHERE stage = 'external' ORDER BY 1") == before
    (model / "config.json").write_text((model / "config.json").read_text() + "\n")
    refused = run(here, "evaluate", *SETTINGS, "--checkpoint", result["checkpoint"], "--max-turns", "2")
    assert refused.returncode == 1
    assert f"{model} has changed since it was added as {result['checkpoint']}" in refused.stderr


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


def test_machine_that_has_only_the_bucket_evaluates_a_checkpoint(
    here: Path, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    origin = StateDir(tmp_path_factory.mktemp("origin") / "var")
    checkpoint = make_checkpoint("sft-000000000001", weights_digest=weights_digest(tiny_folder))
    shutil.copytree(tiny_folder, origin.root / checkpoint.path)
    (origin.root / checkpoint.path / CARD).write_text(json.dumps(checkpoint_card(checkpoint)))
    upsert_checkpoint(origin, checkpoint)
    rebuild_catalog(origin)
    options = ("--max-tasks", "1", "--max-turns", "1", "--checkpoint", checkpoint.checkpoint_id)
    with serve_s3() as s3, pytest.MonkeyPatch.context() as patch:
        for name, value in s3.environment.items():
            patch.setenv(name, value)
        patch.setenv("OSWORLD_STATE_REMOTE", f"s3://{BUCKET}/runs")
        answer(here, "remote", "push", "--state", str(origin.root))
        shutil.rmtree(origin.root)
        result = answer(here, "evaluate", *SETTINGS, *options)
        assert (result["checkpoint"], result["num_valid"]) == (checkpoint.checkpoint_id, 1)
        # What was evaluated here goes back to the bucket by the command alone.
        assert answer(here, "remote", "push")["generation"] == 2
    assert asked(here, "SELECT stage, count(*) FROM evals GROUP BY ALL") == [("sft", 1)]
