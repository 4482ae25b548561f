"""The launcher's side of Ray's Jobs, against a server that answers as Ray does."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from osworld_pipeline.errors import EnvServerError
from osworld_pipeline.runs.launch.job_queue import wait_for_end
from osworld_pipeline.runs.launch.local_ray import RayCluster
from osworld_pipeline.runs.launch.ray_jobs import RayJobs
from osworld_pipeline.runs.placement import RayResources


class FakeRay:
    """Keeps the jobs that were submitted; a job runs until it is stopped."""

    def __init__(self) -> None:
        self.jobs: dict[str, dict[str, Any]] = {}
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                job = fake.jobs.get(self.path.split("/")[3])
                self.answer(200 if job else 404, job or {})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
                if self.headers.get("Authorization") != "Bearer right":
                    return self.answer(401, {})
                parts = self.path.strip("/").split("/")
                if parts[-1] == "stop" and parts[2] in fake.jobs:
                    fake.jobs[parts[2]]["status"] = "STOPPED"
                    return self.answer(200, {"stopped": True})
                if parts[-1] == "stop":
                    return self.answer(404, {})
                if body["entrypoint"] == "python -m broken":
                    return self.answer(500, {"error": "no space"})
                fake.jobs[body["submission_id"]] = {**body, "status": "RUNNING", "message": "going\non"}
                return self.answer(200, {})

            def answer(self, status: int, body: dict[str, Any]) -> None:
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None:
                """Logs nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"


@pytest.fixture
def ray() -> Iterator[FakeRay]:
    fake = FakeRay()
    thread = threading.Thread(target=fake.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield fake
    fake.server.shutdown()
    fake.server.server_close()
    thread.join()


def jobs_of(url: str, token: str | None = "right") -> RayJobs:
    return RayJobs(
        RayCluster(url=url, token=token),
        RayResources(cpus=2, memory_gb=1, custom={"trainer": 1}),
        python="python",
        env_vars={"A": "1"},
        metadata={"program": "x"},
    )


def test_a_job_runs_until_it_is_stopped(ray: FakeRay):
    with jobs_of(ray.url) as jobs:
        jobs.submit("a", "x.y", ["one word"])
        status = jobs.status("a")
        assert (status.status, status.message, status.has_ended) == ("RUNNING", "going", False)
        assert not wait_for_end(jobs, "a", timeout_s=0.1)
        assert jobs.stop("a", timeout_s=5)
        assert jobs.status("a").has_ended
    assert ray.jobs["a"]["entrypoint"] == "python -m x.y 'one word'"
    assert ray.jobs["a"]["runtime_env"] == {"env_vars": {"A": "1"}}
    asked = {name: value for name, value in ray.jobs["a"].items() if name.startswith("entrypoint_")}
    assert asked == {
        "entrypoint_num_cpus": 2,
        "entrypoint_num_gpus": 0,
        "entrypoint_memory": 2**30,
        "entrypoint_resources": {"trainer": 1},
    }


def test_a_job_that_is_unknown_to_the_cluster_counts_as_ended(ray: FakeRay):
    with jobs_of(ray.url) as jobs:
        assert jobs.status("b").has_ended
        assert jobs.stop("b", timeout_s=1)


def test_a_refused_token_is_reported_without_its_value(ray: FakeRay):
    with jobs_of(ray.url, "wrong-9173") as jobs, pytest.raises(EnvServerError, match="refuses") as refusal:
        jobs.submit("a", "x.y", [])
    assert "wrong-9173" not in str(refusal.value)


def test_a_refused_job_is_reported_with_the_message_of_the_cluster(ray: FakeRay):
    with jobs_of(ray.url) as jobs, pytest.raises(EnvServerError, match="no space"):
        jobs.submit("a", "broken", [])


def test_an_unreachable_cluster_is_one_clear_error():
    with jobs_of("http://127.0.0.1:1", None) as jobs, pytest.raises(EnvServerError) as failure:
        jobs.status("a")
    assert "does not answer" in str(failure.value)
