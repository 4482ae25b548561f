"""docs/scaling.md on one machine: hosts with their own networks and processes run every stage of the smoke recipe, and
in each stage one of them loses its power."""

import json
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster_hosts import Host, Network, Running, network
from postgres_server import UNPRIVILEGED, as_ordinary_user, postgres_folder

from benchmarks.ray_nodes import access
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import PipelineError
from osworld_pipeline.policy_servers.cpu_server import cpu_server
from osworld_pipeline.project import project_files, write_project
from osworld_pipeline.recipes import load_recipe
from osworld_pipeline.recipes.schema import TinyModelSection
from osworld_pipeline.runs.base.make_base import tokenizer_corpus
from osworld_pipeline.runs.launch.ray_head import start_command
from osworld_pipeline.tables.query import run_query
from osworld_pipeline.training.tiny.model import build_tiny_checkpoint

pytestmark = [
    pytest.mark.slow,
    pytest.mark.desktop,
    pytest.mark.ray,
    pytest.mark.sglang,
    pytest.mark.timeout(5400),
    pytest.mark.skipif("OSWORLD_TEST_CLUSTER" not in os.environ, reason="takes many minutes: make test-cluster"),
]
START_LIMIT_S = 300.0
STAGE_LIMIT_S = 1200.0
"""For a stage with a power cut."""
QUICK_TO_MISS: Mapping[str, str] = {
    "RAY_health_check_period_ms": "2000",
    "RAY_health_check_timeout_ms": "4000",
    "RAY_health_check_failure_threshold": "3",
}
"""Ray checks nodes more often than by default, and notices a silent one in less than a minute."""
PYTHON = sys.executable
SAMPLES = "The server is fired up"
TRAINED = ("gspo_phase1", "gspo_phase2", "sft")
ENDED = ("SUCCESS", "FAILURE", "CANCELED")
NUM_HELD_OUT = 4
NUM_SEEDS = 3
SETTINGS = (
    "engine.kind=sglang",
    'engine.urls=["http://sampler:30000"]',
    "engine.weights=broadcast",
    "engine.retry_budget_s=600",
    "desktop.num_replicas=4",
    "suite.num_heldout=2",
    "sft.num_updates=60",
    "sft.save_every=5",
    "gspo.phase1.num_updates=4",
    "gspo.phase2.num_updates=4",
    "evaluation.seeds=[0, 1, 2]",
)
NODES: Mapping[str, Mapping[str, float]] = {
    "trainer": {"trainer": 1},
    "desks-1": {"rollouts": 1, "desktop": 4},
    "desks-2": {"rollouts": 1, "desktop": 4},
}
"""By host, what Ray counts on it."""
STATE_OF_NODES = "/tmp/state"
RESOURCES: Mapping[str, Any] = {
    "recipe": {"config": {"name": "smoke", "settings": list(SETTINGS)}},
    "launcher": {
        "config": {
            "runs_on": {
                "ray": {
                    "address": "http://head:8265",
                    "token": {"env": "RAY_CLUSTER_TOKEN"},
                    "python": PYTHON,
                    "num_rollout_actors": 2,
                    "resources_per_rank": {"trainer": 1.0},
                    "resources_per_driver": {"trainer": 0.5},
                    "resources_per_rollout_actor": {"rollouts": 1.0},
                }
            }
        }
    },
    "desktops": {"config": {"ray": {"desktops_per_server": 2}}},
    "tracking": {"config": {"uri": "http://head:5000"}},
}
BUCKET = {
    "AWS_ENDPOINT_URL": "http://head:9000",
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secretsecret",
    "AWS_REGION": "us-east-1",
    "OSWORLD_STATE_REMOTE": "s3://bucket/runs",
}
MAKE_BUCKET = "import boto3; boto3.client('s3', region_name='us-east-1').create_bucket(Bucket='bucket')"


class Team:
    """The hosts of a team: `head` has Dagster, Postgres, MLflow, the object store and Ray's head; see NODES for Ray's
    nodes; `sampler` has an sglang server. Dagster's project and the state are in the shared folder. Ray's nodes have
    the state at another mount, and nothing at the path that Dagster's host uses."""

    def __init__(self, hosts: Network) -> None:
        self.network = hosts
        self.project = hosts.shared / "project"
        self.state = StateDir(self.project / "var")
        self._token = hosts.shared / "token"
        self._token.write_text(secrets.token_hex(32))
        self.state.root.mkdir(parents=True)
        self._hosts = {name: self._add(name) for name in ("head", *NODES, "sampler")}
        self.head = self._hosts["head"]
        self.began = time.monotonic()

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.began:6.0f} s  {text}", flush=True)

    @property
    def ray_environment(self) -> dict[str, str]:
        return {
            **access(self.network.shared),
            **QUICK_TO_MISS,
            "RAY_prestart_worker_first_driver": "0",
            "OMP_NUM_THREADS": "1",
        }

    @property
    def dagster_environment(self) -> dict[str, str]:
        return {
            **BUCKET,
            "RAY_CLUSTER_TOKEN": self._token.read_text(),
            "OSWORLD_DEPLOYMENT": str(self.project / "deployment.yaml"),
            "DAGSTER_HOME": str(self.project),
            "DAGSTER_FILES": str(self.network.shared / "dagster-files"),
            "DAGSTER_PG_HOST": "127.0.0.1",
            "DAGSTER_PG_PORT": "5432",
            "DAGSTER_PG_DATABASE": "postgres",
            "DAGSTER_PG_USER": "dagster",
            "DAGSTER_PG_PASSWORD": "",
            "PWD": str(self.project),
        }

    def start(self) -> None:
        """Starts everything except the node of each host in NODES and the sampler."""
        write_project(self.project, project_files(is_postgres=True))
        (self.project / "deployment.yaml").write_text(yaml.safe_dump({"resources": dict(RESOURCES)}))
        postgres = self._start_postgres()
        store = self.head.start(PYTHON, "-m", "moto.server", "-H", "0.0.0.0", "-p", "9000")
        mlflow = self.head.start(
            *(PYTHON, "-m", "mlflow", "server", "--host", "0.0.0.0", "--port", "5000", "--workers", "1"),
            *("--backend-store-uri", "sqlite:////tmp/mlflow.db", "--artifacts-destination", "/tmp/artifacts"),
            *("--allowed-hosts", "head:5000"),
            environment={"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
        )
        ray = self._start_ray(
            self.head,
            *("--head", "--port=6379", "--num-cpus=0"),
            *("--include-dashboard=true", "--dashboard-host=0.0.0.0", "--dashboard-port=8265"),
        )
        postgres.wait_for("ready to accept connections", START_LIMIT_S)
        store.wait_for("Running on", START_LIMIT_S)
        mlflow.wait_for("Application startup complete", START_LIMIT_S)
        ray.wait_for("Ray runtime started", START_LIMIT_S)
        self.head.run(PYTHON, "-c", MAKE_BUCKET, environment=BUCKET)
        self.say("Postgres, the object store, MLflow and Ray's head run")

    def start_node(self, name: str) -> None:
        resources = json.dumps(dict(NODES[name]))
        options = ("--address=head:6379", "--num-cpus=2", f"--resources={resources}")
        node = self._start_ray(self._hosts[name], *options, OSWORLD_STATE=STATE_OF_NODES)
        node.wait_for("Ray runtime started", START_LIMIT_S)

    def start_sampler(self) -> Running:
        checkpoint = self.network.shared / "start-of-sglang"
        if not checkpoint.exists():
            recipe = load_recipe("smoke", settings=SETTINGS)
            assert isinstance(recipe.model, TinyModelSection)
            build_tiny_checkpoint(checkpoint, recipe.model, tokenizer_corpus(recipe))
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        folder = Path(os.environ["OSWORLD_SGLANG"]).resolve()
        server = cpu_server(folder, checkpoint, ("--host", "0.0.0.0", "--port", "30000"), environment)
        return self._hosts["sampler"].start(*server.arguments, environment={**environment, **server.environment})

    def dagster(self, *arguments: str) -> Running:
        return self.head.start(
            str(Path(PYTHON).with_name(arguments[0])),
            *arguments[1:],
            environment=self.dagster_environment,
            folder=self.project,
        )

    def cut_power(self, name: str) -> None:
        self._hosts[name].switch_off()
        self.say(f"{name} loses its power")
        self._hosts[name] = self._add(name)

    def ask(self, sql: str) -> list[tuple[Any, ...]]:
        return [tuple(row) for row in run_query(self.state, sql).rows]

    def runs(self) -> list[dict[str, str]]:
        """Job, status and tags of each of Dagster's runs."""
        listed = self.head.run(
            *(PYTHON, "-c", LIST_RUNS),
            environment=self.dagster_environment,
            folder=self.project,
            limit_s=START_LIMIT_S,
        )
        return json.loads(listed.splitlines()[-1])

    def _add(self, name: str) -> Host:
        host = self.network.add(name)
        if name in NODES:
            here = str(self.state.root)
            host.run("mkdir", STATE_OF_NODES)
            host.run("mount", "--bind", here, STATE_OF_NODES)
            host.run("mount", "-t", "tmpfs", "-o", "ro", "tmpfs", here)
        return host

    def _start_postgres(self) -> Running:
        programs, folder = postgres_folder(), self.head.folder / "tmp" / "postgres"
        folder.mkdir()
        os.chown(folder, UNPRIVILEGED, UNPRIVILEGED)
        data = "/tmp/postgres/data"
        self.head.run(*as_ordinary_user([str(programs / "initdb"), "-D", data, "-U", "dagster", "-A", "trust", "-N"]))
        options = ["-c", "listen_addresses=127.0.0.1", "-c", "fsync=off", "-k", "/tmp/postgres"]
        return self.head.start(*as_ordinary_user([str(programs / "postgres"), "-D", data, *options]))

    def _start_ray(self, host: Host, *options: str, **variables: str) -> Running:
        command = start_command("--object-store-memory=100000000", *options, "--block")
        return host.start(
            *command, f"--node-ip-address={host.address}", environment={**self.ray_environment, **variables}
        )


LIST_RUNS = """
import json, dagster as dg
with dg.DagsterInstance.get() as instance:
    runs = instance.get_runs()
print(json.dumps([{"job": run.job_name, "status": run.status.value, "id": run.run_id} for run in runs]))
"""
LIST_TRACKED = """
import json, mlflow
client = mlflow.MlflowClient("http://head:5000")
names = {one.experiment_id: one.name for one in client.search_experiments()}
runs = [run for run in client.search_runs(list(names)) if "stage_key" in run.data.tags]
print(json.dumps([[names[run.info.experiment_id], run.info.status] for run in runs]))
"""


@pytest.fixture
def team() -> Iterator[Team]:
    if not os.environ.get("OSWORLD_SGLANG"):
        pytest.skip("takes an environment of its own: make test-cluster")
    with network() as hosts:
        yield Team(hosts)


def until(team: Team, is_so: Callable[[], Any], what: str, limit_s: float = STAGE_LIMIT_S) -> Any:
    """Waits until `is_so` is true, also while the state does not exist yet."""
    deadline = time.monotonic() + limit_s
    while True:
        with suppress(PipelineError):
            if found := is_so():
                team.say(what)
                return found
        assert time.monotonic() < deadline, f"not within {limit_s:.0f} s: {what}"
        time.sleep(0.5)


def num_updates(team: Team, stage: str) -> int:
    ((count,),) = team.ask(f"SELECT count(DISTINCT update) FROM updates WHERE stage = '{stage}'")
    return count


def num_evaluated(team: Team, stage: str) -> int:
    ((count,),) = team.ask(
        "SELECT count(*) FROM episodes JOIN checkpoints USING (checkpoint_id) "
        f"WHERE purpose = 'evaluate' AND checkpoints.stage = '{stage}'"
    )
    return count


def test_every_stage_survives_the_loss_of_a_host(team: Team) -> None:
    sampler = team.start_sampler()
    team.start()
    for name in NODES:
        team.start_node(name)
    team.say("Ray's nodes have joined")
    sampler.wait_for(SAMPLES, START_LIMIT_S)
    team.say("sglang samples")
    daemon = team.dagster("dagster-daemon", "run", "-w", "workspace.yaml")
    team.dagster("dagster", "job", "launch", "-w", "workspace.yaml", "-j", "train").wait(START_LIMIT_S)
    team.say("the job `train` is queued")

    until(team, lambda: num_updates(team, "sft") > 5, "SFT trains")
    team.cut_power("trainer")
    team.start_node("trainer")
    until(team, lambda: num_updates(team, "gspo_phase1"), "GSPO phase 1 trains")
    team.cut_power("desks-1")
    team.start_node("desks-1")
    until(team, lambda: num_updates(team, "gspo_phase2"), "GSPO phase 2 trains")
    team.cut_power("sampler")
    team.start_sampler().wait_for(SAMPLES, START_LIMIT_S)
    team.say("sglang samples again")
    until(team, lambda: num_evaluated(team, "gspo_phase2"), "the last checkpoint is evaluated")
    team.cut_power("desks-2")
    team.start_node("desks-2")
    until(team, lambda: has_ended(team), "all runs have ended")
    assert daemon.process.poll() is None, daemon.output()[-3000:]

    check_record(team)
    evaluate_elsewhere(team)


def has_ended(team: Team) -> bool:
    """Whether all runs have ended, including the evaluations that Dagster's sensor launches."""
    evaluated = {stage for (stage,) in team.ask("SELECT DISTINCT stage FROM evals")}
    return evaluated >= {"base", *TRAINED} and all(run["status"] in ENDED for run in team.runs())


def check_record(team: Team) -> None:
    """Each update and each episode is recorded once, in the state, in Dagster and in MLflow."""
    assert {run["status"] for run in team.runs()} == {"SUCCESS"}
    assert team.ask("SELECT stage, count(*), count(DISTINCT update) FROM updates GROUP BY ALL ORDER BY ALL") == [
        ("gspo_phase1", 4, 4), ("gspo_phase2", 4, 4), ("sft", 60, 60)
    ]  # fmt: skip
    attempts = team.ask("SELECT stage, first_update > 1, status FROM stage_attempts ORDER BY started_utc")
    assert attempts == [
        ("sft", False, "running"),  # the power cut
        ("sft", True, "finished"),
        ("gspo_phase1", False, "finished"),
        ("gspo_phase2", False, "finished"),
    ]
    (counts,) = team.ask("SELECT count(*) > 0, count(*) - count(DISTINCT episode_id) FROM episodes")
    assert counts == (True, 0)
    planned = NUM_HELD_OUT * NUM_SEEDS
    assert team.ask("SELECT stage, count(*), sum(is_valid::INT) FROM evals GROUP BY ALL ORDER BY ALL") == [
        (stage, planned, planned) for stage in ("base", *TRAINED)
    ]
    listed = team.head.run(PYTHON, "-c", LIST_TRACKED, limit_s=START_LIMIT_S)
    assert {tuple(one) for one in json.loads(listed.splitlines()[-1])} >= {
        (f"osworld/{stage}", "FINISHED") for stage in TRAINED
    }


def evaluate_elsewhere(team: Team) -> None:
    """Evaluates on a host with its own project, which can access the object store and nothing else of the team's."""
    ((checkpoint,),) = team.ask("SELECT checkpoint_id FROM checkpoints WHERE stage = 'gspo_phase2'")
    elsewhere, folder = team.network.add("elsewhere"), Path("/tmp/project")
    pipeline = (PYTHON, "-m", "osworld_pipeline.cli")
    elsewhere.run(*pipeline, "init", str(folder), limit_s=START_LIMIT_S)
    said = elsewhere.run(
        *(*pipeline, "evaluate", "--recipe", "smoke", "--checkpoint", checkpoint, "--max-tasks", "1", "--json"),
        environment=BUCKET,
        folder=folder,
        limit_s=STAGE_LIMIT_S,
    )
    team.say("a host that has only the object store has evaluated")
    assert json.loads(said[said.index("{") :])["num_valid"] == 1
