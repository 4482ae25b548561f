"""The Ray launcher on a real Ray of this machine: jobs, ranks of a TorchTrainer, rollout actors, all kinds of ends."""

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from launches import PATIENCE_S, TESTS, cancel, environment, finish, kill, marked, new_mark, start_launch, wait_until
from sft_process import prepare

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed (extra `ray`)"),
]


class Cluster:
    """The embedded Ray, held by a process that acts as its launcher."""

    def __init__(self, folder: Path) -> None:
        self.scratch = folder
        self.holder = subprocess.Popen(
            [sys.executable, str(TESTS / "ray_cluster_process.py"), str(folder / "ray.log"), "5"],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=environment() | {"TMPDIR": str(folder), "HOME": str(folder / "home")},
        )
        assert self.holder.stdout is not None
        with self.holder.stdout as output:
            self.place: dict[str, Any] = json.loads(output.readline())

    @property
    def on(self) -> dict[str, Any]:
        place = {"address": self.place["url"], "token": self.place["token"], "python": sys.executable}
        return {"ray": place}

    def ask(self, path: str) -> str:
        headers = {"Authorization": f"Bearer {self.place['token']}"}
        return httpx.get(self.place["url"] + path, headers=headers, timeout=30).text

    def processes(self) -> list[str]:
        """Processes of this Ray, found by the folder that all of them were started with."""
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if str(self.scratch).encode() in path.read_bytes() and path.parent.name != str(os.getpid()):
                    found.append((path.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:120])
            except OSError:
                continue
        return found


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    # Ray's sockets are below this folder, and their paths may have 107 characters.
    folder = Path("/tmp") / f"ray-test-{os.getpid()}"
    folder.mkdir()
    (folder / "home").mkdir()
    started = Cluster(folder)
    try:
        yield started
    finally:
        started.holder.terminate()
        started.holder.wait(PATIENCE_S)
        shutil.rmtree(folder)


def test_a_job_reports_its_progress_and_its_result_and_shows_no_secret(cluster: Cluster, tmp_path: Path):
    secret = "hush-hush-7391"
    job = {"act": "sum", "numbers": [1, 2], "secret": secret, "mark": new_mark()}
    messages = finish(start_launch(tmp_path, cluster.on, "launched.program", job))
    assert [message.get("done") for message in messages[:-1]] == [1, 2]
    assert messages[-1] == {"kind": "returned", "result": {"sum": 3, "secret": secret}}
    shown = cluster.ask("/api/jobs/")
    assert "launched.program" in shown
    assert secret not in shown
    assert cluster.place["token"] not in shown
    assert list((tmp_path / "launches").iterdir()) == []


def test_a_job_finds_the_address_of_its_own_ray(cluster: Cluster) -> None:
    """Ray uses any Ray of this machine if there are several and this file is missing."""
    (path,) = cluster.scratch.glob("ray-*/ray/ray_current_cluster")
    host, _, port = path.read_text().rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10):
        pass


def test_a_run_starts_a_ray_of_its_own_next_to_another_one(cluster: Cluster, tmp_path: Path) -> None:
    num_jobs = len(json.loads(cluster.ask("/api/jobs/")))
    job = {"act": "sum", "numbers": [1, 2], "secret": "", "mark": new_mark()}
    messages = finish(start_launch(tmp_path, {"ray": {}}, "launched.program", job))
    assert messages[-1]["kind"] == "returned", messages[-1]
    assert len(json.loads(cluster.ask("/api/jobs/"))) == num_jobs, "the job went to the other Ray"


def test_two_ranks_train_under_a_torch_trainer(cluster: Cluster, tmp_path: Path):
    job = prepare(tmp_path)
    job["recipe"]["sft"]["num_updates"] = 4
    messages = finish(start_launch(tmp_path, cluster.on, "train_sft", job, num_processes=2))
    assert messages[-1]["kind"] == "returned", messages[-1]
    assert messages[-1]["result"]["num_updates"] == 4
    assert {"kind": "progress", "done": 4, "total": 4}.items() <= messages[-2].items(), messages


def test_an_actor_that_dies_costs_its_episodes_an_attempt_and_is_replaced(cluster: Cluster, tmp_path: Path):
    once, many, at_start = tmp_path / "once", tmp_path / "many", tmp_path / "at_start"
    for folder, count in ((once, 1), (many, 9), (at_start, 0)):
        folder.mkdir()
        for number in range(count):
            (folder / str(number)).touch()
    on = {"ray": cluster.on["ray"] | {"num_rollout_actors": 2}}
    job = {"once": str(once), "many": str(many), "at_start": str(at_start)}
    launch = start_launch(tmp_path / "state", on, "launched.rollouts", job)
    outcome = finish(launch)[-1]
    assert outcome["kind"] == "returned", outcome
    result = outcome["result"]
    first = {episode["id"]: episode for episode in result["first"]}
    assert len(first) == 6
    assert all(episode["outcome"] == "success" for episode in first.values())
    assert first["deadly-0"]["attempt"] == 1
    assert "it died" in first["deadly-0"]["earlier_faults"][0]
    assert {episode["engine"] for episode in result["second"]} == {"stub 7"}
    assert result["num_running"] == 1, "two replacements die at their start"
    assert {episode["engine"] for episode in result["third"]} == {"stub 7"}
    assert len({episode["client"] for episode in result["third"]}) == 2
    assert list(at_start.iterdir()) == []
    hopeless = result["hopeless"]
    assert (hopeless["outcome"], hopeless["attempt"], hopeless["has_reward"]) == ("policy_fault", 2, False)
    assert result["num_lost"] == 4


def test_a_cancelled_job_cleans_up_and_is_gone(cluster: Cluster, tmp_path: Path):
    mark = new_mark()
    job = {"act": "wait", "mark": mark, "clean_up": str(tmp_path / "clean")}
    launch = start_launch(tmp_path, cluster.on, "launched.program", job)
    wait_until(lambda: marked(mark), "the job runs")
    outcome = cancel(launch)
    assert outcome == {"kind": "failed", "message": "launched.program was cancelled", "allow_retries": False}
    assert marked(mark) == []
    assert (tmp_path / "clean-0").read_text() == "clean"
    assert list((tmp_path / "launches").iterdir()) == []


def test_a_job_ends_when_its_launcher_is_gone_and_leaves_no_mailbox(cluster: Cluster, tmp_path: Path):
    mark = new_mark()
    on = {"ray": cluster.on["ray"] | {"lost_after_s": 4.0}}
    launch = start_launch(tmp_path, on, "launched.program", {"act": "wait", "mark": mark})
    wait_until(lambda: marked(mark), "the job runs")
    kill(launch)
    wait_until(lambda: not marked(mark), "the job has ended", limit_s=30)
    wait_until(lambda: not list((tmp_path / "launches").iterdir()), "no mailbox is left", limit_s=30)


def test_ray_ends_with_a_killed_launcher_and_its_job_is_retryable(cluster: Cluster, tmp_path: Path):
    mark = new_mark()
    on = {"ray": cluster.on["ray"] | {"lost_after_s": 3.0}}
    launch = start_launch(tmp_path, on, "launched.program", {"act": "wait", "mark": mark})
    wait_until(lambda: marked(mark), "the job runs")
    cluster.holder.kill()
    cluster.holder.wait(PATIENCE_S)
    wait_until(lambda: not marked(mark), "the job is gone", limit_s=30)
    wait_until(lambda: not cluster.processes(), "no process of Ray is left", limit_s=30)
    wait_until(lambda: not list(cluster.scratch.glob("ray-*")), "no file of Ray is left", limit_s=30)
    outcome = finish(launch)[-1]
    assert "the Ray cluster" in outcome["message"]
    assert outcome["allow_retries"] is True
    assert not list((cluster.scratch / "home").iterdir()), "Ray wrote into the home folder"
