"""A Ray of several nodes: each program runs on a node with the resources that it needs, the episodes of every kind of
program on actors elsewhere, and its desktops where there is room for them."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from command_runs import LIMIT_S, SETTINGS, answer, asked, run, start, with_instance_settings
from launches import environment, finish, new_mark, start_launch, wait_until
from pydantic import TypeAdapter
from test_verified_replay import ITEMS, RECIPE, recorded, replay_row, write_tables
from trace_collector import Collector, collecting_traces

from benchmarks.ray_nodes import RayNodes, ray_nodes
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.recipes import load_recipe
from osworld_pipeline.runs.launch.ray_head import start_command
from osworld_pipeline.runs.rollouts.embedded_server import EnvServers, ServerSpec, embedded_env_server
from osworld_pipeline.runs.verify_replay.job import VerificationJob
from osworld_pipeline.runs.verify_replay.record import read_record
from osworld_pipeline.store.blobs import BlobStore
from resources.desktops import DesktopsOnRay, DesktopsResource

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed (extra `ray`)"),
]
NODES: list[dict[str, float]] = [
    {"CPU": 2, "trainer": 1},
    {"CPU": 2, "desktop": 1, "screen": 2},
    {"CPU": 2, "desktop": 1},
]
ACTORS: dict[str, Any] = {
    "num_rollout_actors": 2,
    "resources_per_rollout_actor": {"desktop": 1.0},
    "resources_per_driver": {"trainer": 0.5},
}


class Nodes:
    """A head without CPUs and the nodes above."""

    def __init__(self, ray: RayNodes) -> None:
        self.url, self.token, self._ray = ray.url, ray.token, ray

    def launcher(self, **settings: Any) -> dict[str, Any]:
        return {"ray": {"address": self.url, "token": self.token, "python": sys.executable} | settings}

    def add(
        self, resources: dict[str, float], *, num_cpus: int = 0, inside: Sequence[str] = (), **variables: str
    ) -> None:
        """Adds a node. `inside` is a command that starts it, `variables` are added to its environment."""
        options = (f"--address={self._ray.address}", f"--num-cpus={num_cpus}", f"--resources={json.dumps(resources)}")
        subprocess.run(
            [*inside, *start_command("--object-store-memory=100000000", *options)],
            env={**environment(), **self._ray.variables, **variables},
            stdout=subprocess.DEVNULL,  # the node inherits it, so a pipe would stay open
            stderr=subprocess.DEVNULL,
            check=True,
        )

    def kill(self, resource: str) -> None:
        """Kills the node with this resource."""
        (raylet,) = [
            process for process, command in commands() if command[0].endswith("/raylet") and resource in str(command)
        ]
        os.kill(raylet, signal.SIGKILL)

    def ask(self, path: str) -> Any:
        headers = {"Authorization": f"Bearer {self.token}"}
        return httpx.get(self.url + path, headers=headers, timeout=30).raise_for_status().json()

    def having(self, resource: str, *, is_alive: bool = False) -> set[str]:
        """Ids of the nodes that have the resource; with `is_alive`, only of those that run."""
        nodes = self.ask("/api/v0/nodes?detail=true")["data"]["result"]["result"]
        return {
            node["node_id"]
            for node in nodes
            if resource in node["resources_total"] and (node["state"] == "ALIVE" or not is_alive)
        }

    def node_of(self, program: str) -> str:
        """Id of the node of the program's newest job."""
        jobs = [job for job in self.ask("/api/jobs/") if job["metadata"]["program"] == program]
        return max(jobs, key=lambda job: job["start_time"])["driver_node_id"]

    def nodes_of_actors(self) -> set[str]:
        """Ids of the nodes of all rollout actors so far."""
        return {actor["node_id"] for actor in self._actors()}

    def num_actors(self) -> int:
        """Number of rollout actors so far."""
        return len(self._actors())

    def _actors(self) -> list[dict[str, Any]]:
        actors = self.ask("/api/v0/actors?detail=true&limit=1000")["data"]["result"]["result"]
        return [actor for actor in actors if actor["class_name"] == "PooledActor"]


def commands() -> Iterator[tuple[int, list[str]]]:
    """Every process with its command line."""
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and (command := (entry / "cmdline").read_text(errors="replace")):
                yield int(entry.name), command.split("\0")


def env_servers(folder: Path) -> list[int]:
    """Process ids of the env servers with images in `folder`."""
    return [process for process, command in commands() if "--ready-file" in command and str(folder) in str(command)]


@pytest.fixture(scope="module")
def traces() -> Iterator[Collector]:
    """Collects the traces of the programs and actors of the nodes."""
    with collecting_traces() as collector:
        yield collector


@pytest.fixture(scope="module")
def nodes(traces: Collector) -> Iterator[Nodes]:
    with ray_nodes(NODES, {**environment(), "OTEL_EXPORTER_OTLP_ENDPOINT": traces.url}) as ray:
        yield Nodes(ray)


def deployment(
    folder: Path, nodes: Nodes, monkeypatch: pytest.MonkeyPatch, desktops: dict[str, Any] | None = None, **settings: Any
) -> Path:
    """A folder whose commands run their programs on the nodes; with `desktops`, also these. `settings`: of the
    launcher."""
    resources = {"launcher": {"config": {"runs_on": nodes.launcher(**ACTORS | settings)}}}
    if desktops is not None:
        resources["desktops"] = {"config": {"ray": desktops}}
    (folder / "deployment.yaml").write_text(yaml.safe_dump({"resources": resources}))
    monkeypatch.setenv("OSWORLD_DEPLOYMENT", str(folder / "deployment.yaml"))
    return with_instance_settings(folder)


def test_a_trainer_runs_on_a_node_with_its_resources_and_its_actors_on_others(nodes: Nodes, tmp_path: Path) -> None:
    on = nodes.launcher(resources_per_rank={"trainer": 1.0}, **ACTORS)
    returned = finish(start_launch(tmp_path, on, "launched.placed", {}))[-1]
    assert returned["kind"] == "returned", returned
    assert {nodes.node_of("launched.placed")} == nodes.having("trainer")
    assert set(returned["result"]["actors"]) == nodes.having("desktop")


def test_a_program_that_fits_nowhere_fails_and_names_what_is_missing(nodes: Nodes, tmp_path: Path) -> None:
    on = nodes.launcher(resources_per_rank={"quantum": 1.0}, start_timeout_s=3.0)
    failed = finish(start_launch(tmp_path, on, "launched.placed", {}))[-1]
    assert failed["kind"] == "failed"
    assert failed["message"].startswith("launched.placed did not start within 3 s")
    assert "1 CPUs, 1 quantum" in failed["message"]


@pytest.mark.desktop
def test_episodes_of_a_collection_run_on_actors_and_are_traced(
    nodes: Nodes, traces: Collector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = deployment(tmp_path, nodes, monkeypatch)
    collected = answer(here, "collect", *SETTINGS, "--oracle", "--max-tasks", "2")
    assert collected["num_episodes"] == collected["num_success"] == 2
    assert {nodes.node_of("collect")} == nodes.having("trainer")
    assert nodes.nodes_of_actors() == nodes.having("desktop")
    assert asked(here, "SELECT count(*), bool_and(image_digest <> '') FROM episodes") == [(2, True)]
    for (episode_id,) in asked(here, "SELECT episode_id FROM episodes"):
        tree = traces.tree(episode_id)
        assert {"episode", "episode/attempt/reset", "episode/attempt/turn/generate", "episode/attempt/close"} <= set(
            tree
        )
        assert [one for one in tree if one.startswith("?")] == []


@pytest.mark.desktop
async def test_demonstrations_are_verified_by_actors(nodes: Nodes, tmp_path: Path) -> None:
    state, items = StateDir(tmp_path), list(ITEMS[:2])
    spec = ServerSpec(state=state, num_replicas=2, screen_width=512, screen_height=320)
    with embedded_env_server(spec) as servers:
        played = await recorded(servers, items)
        blobs = BlobStore(state.blobs)
        write_tables(state, [replay_row(one, blobs, line) for line, one in enumerate(played.values())], items)
        job = VerificationJob(recipe=RECIPE, state_root=state.root, servers=servers).model_dump(mode="json")
        before = nodes.num_actors()
        launch = start_launch(tmp_path, nodes.launcher(**ACTORS), "verify_replay", job)
        returned = finish(launch)[-1]
    assert returned["result"] == {"num_verified": 2, "num_failed": 0, "num_open": 0}
    assert {one.reward for one in read_record(state)} == {1.0}
    assert nodes.num_actors() == before + ACTORS["num_rollout_actors"]


@pytest.mark.skipif(os.geteuid() != 0, reason="a mount needs root")
def test_a_program_on_a_node_without_the_state_fails_and_reports_it(nodes: Nodes, tmp_path: Path) -> None:
    nodes.add({"blind": 1}, num_cpus=1, inside=with_mount_elsewhere(tmp_path / "var", tmp_path / "mnt"))
    on = nodes.launcher(resources_per_rank={"blind": 1.0})
    failed = finish(start_launch(tmp_path / "var", on, "launched.placed", {}))[-1]
    assert f"StoreError: the state folder of this run is not at {tmp_path / 'var'} on host" in failed["message"]


def with_mount_elsewhere(state: Path, elsewhere: Path) -> list[str]:
    """The prefix of a command that sees the folder at another path; at the folder's own path is an empty folder."""
    state.mkdir()
    elsewhere.mkdir()
    mount = 'mount --bind "$1" "$2" && mount -t tmpfs tmpfs "$1" && shift 2 && exec "$@"'
    return ["unshare", "--mount", "--propagation", "private", "sh", "-c", mount, "sh", str(state), str(elsewhere)]


@pytest.mark.desktop
@pytest.mark.skipif(os.geteuid() != 0, reason="a mount needs root")
def test_a_node_may_have_the_state_at_another_mount(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "mnt"
    inside = with_mount_elsewhere(tmp_path / "var", elsewhere)
    nodes.add({"elsewhere": 2}, num_cpus=3, inside=inside, OSWORLD_STATE=str(elsewhere))
    there = {"resources_per_rollout_actor": {"elsewhere": 1.0}, "resources_per_rank": {"elsewhere": 1.0}}
    here = deployment(tmp_path, nodes, monkeypatch, **there)
    collected = answer(here, "collect", *SETTINGS, "--oracle", "--max-tasks", "2")
    assert collected["num_episodes"] == collected["num_success"] == 2
    assert nodes.having("elsewhere") <= nodes.nodes_of_actors()
    blobs = BlobStore(StateDir(here / "var").blobs)
    screenshots = asked(here, "SELECT DISTINCT screenshot_sha256 FROM steps")
    assert all(blobs.read(sha256).startswith(b"\x89PNG") for (sha256,) in screenshots)
    for act, num_processes, result in (("sum", 1, {"sum": 3}), ("sum_of_ranks", 2, {"sum": 3.0, "world_size": 2})):
        job = {"act": act, "numbers": [1, 2], "mark": new_mark()}
        on = nodes.launcher(resources_per_rank={"elsewhere": 1.0})
        launch = start_launch(here / "var", on, "launched.program", job, num_processes=num_processes)
        returned = finish(launch)[-1]
        assert returned["result"].items() >= result.items()


def on_screens(folder: Path, **settings: Any) -> dict[str, Any]:
    """Values of `desktops.ray`."""
    folder = folder / "desktops"
    return {"desktops_per_server": 1, "resources_per_desktop": {"screen": 1.0}, "folder": str(folder), **settings}


def launch_with_desktops(
    folder: Path, nodes: Nodes, *, num_processes: int = 1, start_timeout_s: float = 600.0, **settings: Any
) -> dict[str, Any]:
    """The outcome of a program that counts its two desktops."""
    recipe = load_recipe("smoke", settings=["desktop.num_replicas=2"])
    resource = DesktopsResource(ray=DesktopsOnRay(**on_screens(folder, **settings)))
    with resource.serve(StateDir(folder), recipe, run_id="r") as servers:
        sent = TypeAdapter(EnvServers).dump_python(servers, mode="json")
    job = {"servers": sent, "state_root": str(folder)}
    on = nodes.launcher(start_timeout_s=start_timeout_s)
    said = finish(start_launch(folder, on, "launched.desktops", job, num_processes=num_processes))
    return {**said[-1], "pages": [one["message"] for one in said if one["kind"] == "info"]}


@pytest.mark.desktop
def test_each_of_several_ranks_finds_the_desktops_of_the_cluster(nodes: Nodes, tmp_path: Path) -> None:
    returned = launch_with_desktops(tmp_path, nodes, num_processes=2)
    assert returned.get("result") == {"desktops": 2, "has_token": True}, returned
    assert returned["pages"][0].endswith("/status")


@pytest.mark.desktop
def test_the_autoscaler_adds_a_node_for_desktops_and_removes_it(tmp_path: Path) -> None:
    with ray_nodes([], environment(), added={"CPU": 2, "screen": 2}) as ray:
        growing = Nodes(ray)
        returned = launch_with_desktops(tmp_path, growing, desktops_per_server=2, ready_timeout_s=300)
        assert returned.get("result") == {"desktops": 2, "has_token": True}, returned
        assert len(growing.having("screen")) == 1
        wait_until(lambda: not growing.having("screen", is_alive=True), "the idle node is removed", limit_s=120)


def test_desktops_for_which_no_node_has_room_are_named(nodes: Nodes, tmp_path: Path) -> None:
    failed = launch_with_desktops(tmp_path, nodes, start_timeout_s=20.0, resources_per_desktop={"quantum": 1.0})
    assert failed["message"].startswith("no env server started within 20 s, because no node had room for one")
    assert "an env server needs 1 quantum on one node" in failed["message"]
    assert failed["allow_retries"]


def test_an_env_server_that_cannot_start_ends_the_program_with_its_reason(nodes: Nodes, tmp_path: Path) -> None:
    failed = launch_with_desktops(tmp_path, nodes, options=["--no-such-option"])
    assert failed["message"].startswith("no env server starts on this cluster: the env server ended with status 2")
    assert "--no-such-option" in failed["message"]


@pytest.mark.desktop
def test_desktops_run_on_several_nodes_and_those_of_a_lost_node_are_replaced(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes.add({"screen": 2, "doomed": 1})
    here = deployment(tmp_path, nodes, monkeypatch, on_screens(tmp_path, desktops_per_server=2))
    log = here / "var/logs/env-servers.log"

    def num_started() -> int:
        return log.read_text().count(" runs at http://") if log.exists() else 0

    def num_stored() -> int:
        return len(list((here / "var/trajectories/episodes").rglob("*.parquet")))

    settings = (*SETTINGS, "--set", "desktop.num_replicas=4", "--set", "desktop.pause_s=1.0")
    collecting = start(here, "collect", *settings, "--oracle", "--samples", "500")
    try:
        wait_until(lambda: num_started() == 2, "both env servers run", limit_s=120)
        nodes.add({"screen": 2, "spare": 1})
        wait_until(num_stored, "an episode ends", limit_s=60)
        nodes.kill("doomed")
        wait_until(lambda: num_started() == 3, "the lost server runs on the new node", limit_s=120)
        num_before = num_stored()
        wait_until(lambda: num_stored() > num_before + 4, "episodes go on", limit_s=60)
    finally:
        collecting.send_signal(signal.SIGINT)
        _, errors = collecting.communicate(timeout=LIMIT_S)
    assert "collect was cancelled" in errors
    assert run(here, "rebuild-catalog").returncode == 0
    ((count, are_distinct, is_success),) = asked(
        here, "SELECT count(*), count(*) = count(DISTINCT episode_id), bool_and(is_success) FROM episodes"
    )
    assert count > 2
    assert are_distinct
    assert is_success
    wait_until(lambda: not env_servers(tmp_path), "the env servers end with the program", limit_s=60)
