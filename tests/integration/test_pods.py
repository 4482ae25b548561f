"""The pods of the Kubernetes manifests, run by Podman. `make test-deploy` builds the images and runs it."""

import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from jobs_api import jobs_api
from podman_cluster import SECRETS, PodmanCluster, podman, podman_cluster, render
from postgres_server import running_postgres

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(not os.environ.get("OSWORLD_TEST_DEPLOY"), reason="make test-deploy builds the images it needs"),
]
NAMES = ("env-server-0", "env-server-1")
NUM_UPDATES = 6
"""Of one server; each is updated three times, while it has a live episode."""
RUN_LIMIT_S = 900.0
LAUNCH = """
mutation {
  launchRun(executionParams: {runConfigData: {}, selector: {
    repositoryLocationName: "osworld_pipeline", repositoryName: "__repository__", jobName: "train"
  }}) { ... on LaunchRunSuccess { run { runId } } ... on PythonError { message } }
}"""
STATUS = "query($id: ID!) { runOrError(runId: $id) { ... on Run { status } } }"
TASK = {
    "id": "read-a-file",
    "instruction": "Nothing is left to do.",
    "config": [{"type": "execute", "parameters": {"command": "echo milk > /home/user/todo.txt", "shell": True}}],
    "evaluator": {
        "func": "exact_match",
        "result": {"type": "vm_command_line", "command": "cat /home/user/todo.txt", "shell": True},
        "expected": {"type": "rule", "rules": {"expected": "milk\n"}},
    },
}
STAGES = {"sft", "gspo_phase1", "gspo_phase2"}
DEPLOYMENTS = ("mlflow", "code", "dagster", "dagster-daemon", "viewer")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[PodmanCluster]:
    with podman_cluster(tmp_path) as running:
        yield running


def test_no_episode_is_lost_while_the_env_servers_are_updated(cluster: PodmanCluster, tmp_path: Path) -> None:
    without_tracking(cluster)
    server = cluster.document("StatefulSet", "env-server")["spec"]["template"]["spec"]
    for name in NAMES:
        cluster.start("StatefulSet", "env-server", pod=name)
    logs: list[str] = []
    output = tmp_path / "train.log"
    command = cluster.command(
        *("osworld-pipeline", "train", "--recipe", "/etc/osworld/recipe.toml"),
        *("--set", "evaluation.seeds=[0,1,2,3,4,5]", "--set", "desktop.num_replicas=4"),
    )
    with output.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out) as run:
        try:
            deadline = time.monotonic() + RUN_LIMIT_S
            while run.poll() is None and len(logs) < NUM_UPDATES:
                assert time.monotonic() < deadline, output.read_text()
                name = NAMES[len(logs) % len(NAMES)]
                if not is_in_use(cluster, name):
                    continue
                logs.append(cluster.end(name, "env-server", server["terminationGracePeriodSeconds"]))
                cluster.start("StatefulSet", "env-server", pod=name)
            run.wait(deadline - time.monotonic())
        finally:
            run.kill()
    assert run.returncode == 0, output.read_text()
    assert len(logs) == NUM_UPDATES, "the run took longer than the updates"
    (counted,) = cluster.query(
        "SELECT count(*) AS episodes, count(*) FILTER (NOT is_valid) AS faults, "
        "count(*) FILTER (len(earlier_faults) > 0) AS repeated, count(DISTINCT episode_id) AS ids FROM episodes"
    )
    num_met = sum("draining: 0 episodes" not in log for log in logs)
    print(f"{len(logs)} updates of a server, {num_met} with live episodes; {counted}")
    assert (counted["faults"], counted["repeated"]) == (0, 0)
    assert counted["ids"] == counted["episodes"] >= 30
    assert all("draining" in log for log in logs)
    assert num_met >= NUM_UPDATES // 2, "updates met live episodes"
    assert not [log for log in logs if "did not end within" in log]


def without_tracking(cluster: PodmanCluster) -> None:
    deployment = cluster.folder / "kubernetes" / "config" / "deployment.yaml"
    resources = yaml.safe_load(deployment.read_text())["resources"]
    del resources["tracking"]
    deployment.write_text(yaml.safe_dump({"resources": resources}))
    render(cluster)


def is_in_use(cluster: PodmanCluster, name: str) -> bool:
    """Whether its server has a live episode."""
    return json.loads(get(f"http://{cluster.address(name)}:8100/health"))["episodes"] > 0


def test_dagster_trains_in_jobs_and_repeats_a_run_whose_pod_is_lost(cluster: PodmanCluster) -> None:
    """The pods of Dagster, MLflow and the viewer, with Postgres outside the cluster: the launcher of runs creates a Job
    for a run of `train`, whose pod is killed during training. The daemon starts a second run, which completes every
    stage."""
    for name in NAMES:
        cluster.start("StatefulSet", "env-server", pod=name)
    password = SECRETS["DAGSTER_PG_PASSWORD"]
    with running_postgres(cluster.gateway, password) as port, jobs_api(cluster) as jobs:
        use_postgres(cluster, port, password)
        for name in DEPLOYMENTS:
            cluster.start("Deployment", name)
        first = ask_dagster(cluster, LAUNCH, {})["launchRun"]["run"]["runId"]
        until(lambda: bool(training(jobs)), "the first job", lambda: cluster.log("dagster-daemon", "main"))
        (name,) = training(jobs)
        until(lambda: num_updates(cluster) > 0, "an update", lambda: cluster.log(name, "dagster"))
        podman("pod", "kill", name)
        until(lambda: len(training(jobs)) == 2, "a second job", lambda: cluster.log("dagster-daemon", "main"))
        _, again = training(jobs)
        second = jobs[again]["metadata"]["labels"]["dagster/run-id"]
        ended = {"SUCCESS", "FAILURE", "CANCELED"}
        until(lambda: status(cluster, second) in ended, "the second run", lambda: cluster.log(again, "dagster"))
        assert (status(cluster, first), status(cluster, second)) == ("FAILURE", "SUCCESS"), cluster.log(
            again, "dagster"
        )
        # The daemon evaluates each new checkpoint, in jobs of their own.
        until(lambda: evaluated(cluster) >= STAGES, "evaluations", lambda: cluster.log("dagster-daemon", "main"))
        check_record(cluster)
        check_pages(cluster)


def test_a_ray_cluster_trains_with_its_token_and_rejects_other_jobs(cluster: PodmanCluster, tmp_path: Path) -> None:
    """The pods of the component ray. `ray start` has the parameters of their groups, as an operator gives them."""
    choose_ray(cluster)
    cluster.start("StatefulSet", "env-server", pod=NAMES[0])
    ray = cluster.document("RayCluster", "trainers")["spec"]
    workers, head = ray["workerGroupSpecs"][0], "trainers-head"
    play_ray(cluster, head, ray["headGroupSpec"], "--head", alias="trainers-head-svc")
    jobs = f"http://{cluster.address(head)}:8265/api/jobs/"
    until(lambda: answers(jobs), "Ray's head", lambda: cluster.log(head, "ray"))
    play_ray(cluster, "trainers-worker", workers, "--address=trainers-head-svc:6379 --num-cpus=4")
    for token in ("", "another-token"):
        with pytest.raises(urllib.error.HTTPError, match=r"401|403"):
            get(jobs, token=token, body=json.dumps({"entrypoint": "id"}).encode())
    command = cluster.command("osworld-pipeline", "train", "--recipe", "/etc/osworld/recipe.toml")
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_LIMIT_S)
    assert done.returncode == 0, (
        done.stdout[-3000:] + done.stderr[-3000:] + cluster.log("trainers-worker", "ray")[-2000:]
    )
    assert evaluated(cluster) >= STAGES
    entrypoints = [one["entrypoint"] for one in json.loads(get(jobs, token=SECRETS["RAY_AUTH_TOKEN"]))]
    print(f"{len(entrypoints)} jobs of Ray")
    assert any("train_gspo" in one for one in entrypoints), entrypoints


def choose_ray(cluster: PodmanCluster) -> None:
    without_tracking(cluster)
    components = cluster.folder / "kubernetes" / "kustomization.yaml"
    components.write_text(components.read_text().replace("# - components/ray ", "- components/ray "))
    deployment = cluster.folder / "kubernetes" / "config" / "deployment.yaml"
    resources = yaml.safe_load(deployment.read_text())["resources"]
    ray = {"address": "http://trainers-head-svc:8265", "token": {"env": "RAY_AUTH_TOKEN"}, "start_timeout_s": 300}
    deployment.write_text(
        yaml.safe_dump({"resources": resources | {"launcher": {"config": {"runs_on": {"ray": ray}}}}})
    )
    render(cluster)


def play_ray(cluster: PodmanCluster, pod: str, group: dict[str, Any], options: str, *, alias: str = "") -> None:
    """Starts a Ray pod on this machine, which has neither the processors nor the GPUs that the pod's group requests."""
    parameters = " ".join(f"--{name}={value}" for name, value in group["rayStartParams"].items())
    spec = group["template"]["spec"]
    (container,) = spec["containers"]
    del container["resources"]
    container["command"] = ["bash", "-c", f"exec ray start {options} {parameters} --block"]
    spec["volumes"] = [one for one in spec["volumes"] if one["name"] != "shm"]
    container["volumeMounts"] = [one for one in container["volumeMounts"] if one["name"] != "shm"]
    cluster.play(pod, spec, alias=alias)


def answers(url: str) -> bool:
    try:
        get(url, token=SECRETS["RAY_AUTH_TOKEN"])
    except OSError:
        return False
    return True


def test_a_virtual_machine_serves_an_episode_from_the_image_of_its_guest(cluster: PodmanCluster) -> None:
    """The component kvm with one desktop, which is emulated where this host has no KVM."""
    components = cluster.folder / "kubernetes" / "kustomization.yaml"
    components.write_text(components.read_text().replace("# - components/kvm ", "- components/kvm "))
    render(cluster)
    (container,) = cluster.document("StatefulSet", "env-server")["spec"]["template"]["spec"]["containers"]
    if subprocess.run(["podman", "image", "exists", container["image"]], timeout=60).returncode:
        pytest.skip("no image env-server-qemu (make images QEMU=1)")
    container["args"] = [*container["args"], "--replicas=1"]
    cluster.start("StatefulSet", "env-server")
    episodes = f"http://{cluster.address('env-server')}:8100/v1/episodes"
    ask = partial(get, token=SECRETS["ENV_SERVER_TOKEN"])
    episode = json.loads(ask(episodes, body=json.dumps({"request_id": "one", "task_config": TASK}).encode()))
    assert json.loads(ask(f"{episodes}/{episode['episode_id']}/evaluation", body=b"{}"))["reward"] == 1.0
    log = cluster.log("env-server", "env-server")
    assert "building" not in log, log


def training(jobs: dict[str, dict[str, Any]]) -> list[str]:
    """The jobs of `train`."""
    return [name for name, job in jobs.items() if job["metadata"]["labels"]["dagster/job"] == "train"]


def use_postgres(cluster: PodmanCluster, port: int, password: str) -> None:
    """Writes its address into cluster.env, and makes the two databases."""
    import psycopg2

    values = cluster.folder / "kubernetes" / "cluster.env"
    text = values.read_text().replace("DAGSTER_PG_HOST=postgres", f"DAGSTER_PG_HOST={cluster.gateway}")
    values.write_text(text.replace("DAGSTER_PG_PORT=5432", f"DAGSTER_PG_PORT={port}"))
    render(cluster)
    connection = psycopg2.connect(host=cluster.gateway, port=port, user="dagster", password=password, dbname="postgres")
    connection.autocommit = True
    with connection.cursor() as cursor:
        for name in ("dagster", "mlflow"):
            cursor.execute(f"CREATE DATABASE {name}")
    connection.close()


def status(cluster: PodmanCluster, run_id: str) -> str:
    return ask_dagster(cluster, STATUS, {"id": run_id})["runOrError"]["status"]


def ask_dagster(cluster: PodmanCluster, query: str, variables: dict[str, str]) -> dict[str, Any]:
    """Queries Dagster as Dagster's page does."""
    answer = json.loads(
        get(
            f"http://{cluster.address('dagster')}:3000/graphql",
            body=json.dumps({"query": query, "variables": variables}).encode(),
        )
    )
    assert "errors" not in answer, answer
    return answer["data"]


def num_updates(cluster: PodmanCluster) -> int:
    catalog = Path(podman("volume", "inspect", cluster.state, "--format", "{{.Mountpoint}}"), "osworld.duckdb")
    return cluster.query("SELECT count(*) AS n FROM updates")[0]["n"] if catalog.exists() else 0


def evaluated(cluster: PodmanCluster) -> set[str]:
    return {one["stage"] for one in cluster.query("SELECT DISTINCT stage FROM evals")}


def check_record(cluster: PodmanCluster) -> None:
    """Each update and each episode is recorded once. MLflow's own server has a run for each stage."""
    (counted,) = cluster.query(
        "SELECT count(*) AS episodes, count(DISTINCT episode_id) AS ids, count(*) FILTER (NOT is_valid) AS faults "
        "FROM episodes"
    )
    assert counted["episodes"] == counted["ids"] > 0
    updates = cluster.query("SELECT stage, count(*) AS n, count(DISTINCT update) AS ids FROM updates GROUP BY stage")
    assert {one["stage"] for one in updates} == STAGES
    assert all(one["n"] == one["ids"] for one in updates)
    attempts = cluster.query("SELECT status, count(*) AS n FROM stage_attempts GROUP BY status")
    print(counted, updates, attempts)
    tracked = f"http://{cluster.address('mlflow')}:5000/api/2.0/mlflow"
    found = json.loads(get(f"{tracked}/experiments/search?max_results=100", host="localhost:5000"))["experiments"]
    names = {one["name"] for one in found}
    assert names >= {f"osworld/{stage}" for stage in STAGES}, names


def check_pages(cluster: PodmanCluster) -> None:
    viewer = f"http://{cluster.address('viewer')}:8200/"
    with pytest.raises(urllib.error.HTTPError, match="401"):
        get(viewer)
    assert "gspo_phase2" in get(viewer, token=SECRETS["OSWORLD_VIEWER_TOKEN"])
    assert "dagster" in get(f"http://{cluster.address('dagster')}:3000/").lower()


def get(url: str, *, host: str = "", token: str = "", body: bytes | None = None) -> str:
    headers = {"Content-Type": "application/json"} if body else {}
    headers |= {"Host": host} if host else {}
    headers |= {"Authorization": f"Bearer {token}"} if token else {}
    with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=60) as answer:
        return answer.read().decode()


def until(is_so: Callable[[], bool], what: str, explain: Callable[[], str] = str) -> None:
    deadline = time.monotonic() + RUN_LIMIT_S
    while not is_so():
        assert time.monotonic() < deadline, f"no sign of {what}: {explain()}"
        time.sleep(1)
