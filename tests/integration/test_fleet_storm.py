"""A storm of faults on the env servers of three hosts during asynchronous GSPO, with the program and its trainer and
engine as they are launched: 768 to 1,536 simulated desktops and a few real ones, while servers are killed, drain, join
and lose their network. `make test-storm` runs it for half an hour."""

import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from cluster_hosts import Host, Running, network
from storm_run import GROUP_SIZE
from test_training_faults import NOTHING

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.store import TrajectoryStore
from osworld_pipeline.tables.catalog import rebuild_catalog
from osworld_pipeline.tables.query import run_query

SECONDS = float(os.environ.get("OSWORLD_STORM_S") or 0)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.desktop,
    pytest.mark.timeout(SECONDS + 900),
    pytest.mark.skipif(not SECONDS, reason="takes half an hour: make test-storm"),
]
NAMES = ("desktops-1", "desktops-2", "desktops-3")
NUM_DESKTOPS = 256
"""Simulated ones of a server. Three servers are there from the start, and three join and leave."""
NUM_SLOTS = 6 * NUM_DESKTOPS + 8
"""Episodes in flight: as many as there may be desktops, so that a server that joins is wanted."""
PORT, REAL_PORT, LATE_PORT = 8100, 8101, 8102
STEP_S = 50.0
DRAIN_S = 240.0
START_LIMIT_S = 300.0
END_LIMIT_S = 600.0
RAMP_S = 60.0
"""The program's time beyond the storm, in which its first episodes begin."""
KINDS = ("kill", "drain", "join", "silence")
QUIET_S = (8.0, 20.0)
"""Between two blows."""
SILENT_S = (5.0, 45.0)
"""How long a host has no network; a client gives a silent server up after 30 s."""
JOIN_LIMIT_S = 10.0
BUSY_BAR = 0.9
TOKEN = "a-token-of-the-storm"


@dataclass
class Fleet:
    hosts: dict[str, Host]
    trainer: Host
    folder: Path
    """Which all hosts see."""
    servers: dict[str, Running] = field(default_factory=dict)
    """By URL, the latest one that was started there."""
    blows: Counter[str] = field(default_factory=Counter)
    _names: dict[str, str] = field(default_factory=dict)

    def url(self, name: str, port: int) -> str:
        url = f"http://{self.hosts[name].address}:{port}"
        self._names[url] = name
        return url

    def start(self, url: str) -> None:
        host, port = self.hosts[self._names[url]], int(url.rpartition(":")[2])
        common = ["--host", host.address, "--port", str(port), "--drain-episodes-s", str(DRAIN_S)]
        common += ["--screen-size", "512x320"]
        if port == REAL_PORT:
            command = [str(Path(sys.executable).with_name("env-server")), *common]
        else:
            command = [sys.executable, "-m", "benchmarks.stub", "--decodable", "--step-s", str(STEP_S), *common]
            command += ["--replicas", str(NUM_DESKTOPS), "--success-share", "0.5"]
        # The environment of this process has no token, and its folder has the benchmarks.
        self.servers[url] = host.start(*command, environment={"ENV_SERVER_TOKEN": TOKEN}, folder=Path.cwd())

    def signal(self, url: str, number: int) -> None:
        """Sends the signal to the program, not to nsenter, which started it in its host."""
        starter = self.servers[url].process.pid
        (pid,) = Path(f"/proc/{starter}/task/{starter}/children").read_text().split()
        os.kill(int(pid), number)

    def is_running(self, url: str) -> bool:
        return url in self.servers and self.servers[url].process.poll() is None


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    with network() as hosts:
        yield Fleet(hosts={name: hosts.add(name) for name in NAMES}, trainer=hosts.add("trainer"), folder=hosts.shared)


def test_no_episode_is_lost_or_counted_twice_in_a_storm_of_faults(fleet: Fleet) -> None:
    folder = fleet.folder
    simulated = [fleet.url(name, PORT) for name in NAMES]
    real = [fleet.url(name, REAL_PORT) for name in NAMES]
    late = [fleet.url(name, LATE_PORT) for name in NAMES]
    for url in (*simulated, *real):
        fleet.start(url)
    command = [sys.executable, "-u", str(Path(__file__).with_name("storm_run.py"))]
    command += [
        "--urls",
        ",".join([*simulated, *real, *late]),
        "--slots",
        str(NUM_SLOTS),
        "--seconds",
        str(SECONDS + RAMP_S),
        "--folder",
        str(folder),
    ]
    variables = {"ENV_SERVER_TOKEN": TOKEN, "PYTHONPATH": str(Path.cwd())}
    run = fleet.trainer.start(*command, environment=variables, folder=Path.cwd())
    until(lambda: busy_share(last_sample(folder)) > BUSY_BAR, "the first episodes", run)
    calm_until, storm_until = time.time(), time.monotonic() + SECONDS
    rng = random.Random(0)
    blows = in_rounds(rng)
    while time.monotonic() < storm_until:
        assert run.process.poll() is None, run.output()[-3000:]
        strike(next(blows), fleet, rng, simulated, late)
        for url in simulated:
            if not fleet.is_running(url):  # it was killed, or has drained
                fleet.start(url)
        time.sleep(rng.uniform(*QUIET_S))
    run.wait(END_LIMIT_S)
    check(folder, json.loads(run.output().splitlines()[-1]), fleet, late, since=calm_until)


def in_rounds(rng: random.Random) -> Iterator[str]:
    """Endless rounds in which each kind of fault occurs once, in random order."""
    while True:
        yield from rng.sample(KINDS, len(KINDS))


def strike(blow: str, fleet: Fleet, rng: random.Random, simulated: list[str], late: list[str]) -> None:
    url = rng.choice(late if blow == "join" else simulated)
    if blow == "join":
        if fleet.is_running(url):
            fleet.signal(url, signal.SIGTERM)
            blow = "leave"
        else:
            fleet.start(url)
    elif blow == "silence":
        host = next(one for one in fleet.hosts.values() if one.address in url)
        host.run("ip", "link", "set", "eth0", "down")
        time.sleep(rng.uniform(*SILENT_S))
        host.run("ip", "link", "set", "eth0", "up")
    elif fleet.is_running(url):
        fleet.signal(url, signal.SIGKILL if blow == "kill" else signal.SIGTERM)
    fleet.blows[blow] += 1


def check(folder: Path, result: dict[str, Any], fleet: Fleet, late: list[str], *, since: float) -> None:
    state = StateDir(folder / "state")
    store, updates = TrajectoryStore(state), result["updates"]
    episodes = [one for part in store.read_parts(store.existing_parts()).values() for one in part]
    rebuild_catalog(state)
    statuses = dict(run_query(state, "SELECT fate, sum(len(episode_ids))::INT FROM rollout_groups GROUP BY 1").rows)
    kept = samples(folder, since)
    busy = sum(busy_share(one) for one in kept) / len(kept)
    joined = [wait for url in late for wait in joins(kept, url)]
    trained = [one for one in updates if "loss" in one]
    print(
        f"\n{SECONDS:.0f} s, {dict(fleet.blows)}: {len(trained)} of {len(updates)} updates trained, largest difference "
        f"of trainer and sampler {max(one['trainer_sampler_logprob_diff'] for one in trained):.2g}; {len(episodes)} "
        f"episodes, {statuses}, {dict(Counter(str(one.outcome) for one in episodes))}, "
        f"{sum(bool(one.earlier_faults) for one in episodes)} begun again; desktops in use {busy:.1%}; joined servers "
        f"in use after {[round(wait, 1) for wait in joined]} s"
    )
    assert len({one.episode_id for one in episodes}) == len(episodes) == sum(statuses.values()) > 0, "counted twice"
    assert len(episodes) - statuses.get("held", 0) == sum(one["num_episodes"] for one in updates)
    for what, sql in NOTHING.items():
        assert run_query(state, sql).rows == [], what
    members: dict[str, set[str]] = {}
    for one in episodes:
        members.setdefault(one.group_id or "", set()).add(one.episode_id)
    planned = {f"s{index:02d}" for index in range(GROUP_SIZE)}
    for group, ids in members.items():
        assert {one.removeprefix(f"{group}-") for one in ids} >= planned, f"an episode of {group} is lost"
    assert result["stopped"], "the time ended it"
    assert busy >= BUSY_BAR
    assert max(joined, default=0.0) <= JOIN_LIMIT_S


def samples(folder: Path, since: float = 0.0) -> list[dict[str, Any]]:
    lines = (folder / "samples.jsonl").read_text().splitlines(keepends=True)
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    return [one for one in found if one["at"] >= since]


def last_sample(folder: Path) -> dict[str, Any]:
    found = samples(folder) if (folder / "samples.jsonl").exists() else []
    return found[-1] if found else {"servers": {}}


def busy_share(sample: dict[str, Any]) -> float:
    """The share of desktops that have one of the run's episodes, of all servers that answer and take episodes."""
    open_ones = [one for one in sample["servers"].values() if one["status"] == "ok"]
    return sum(one["in_use"] for one in open_ones) / max(1, sum(one["replicas"] for one in open_ones))


def joins(kept: list[dict[str, Any]], url: str) -> Iterator[float]:
    """For each start of a server, the seconds until nearly all its desktops were in use."""
    ready_at = 0.0
    for sample in kept:
        one = sample["servers"].get(url)
        if one is None or one["status"] != "ok":
            ready_at = 0.0
        elif not ready_at and one["in_use"] < BUSY_BAR * one["replicas"]:
            ready_at = sample["at"]
        elif ready_at > 0 and one["in_use"] >= BUSY_BAR * one["replicas"]:
            yield sample["at"] - ready_at
            ready_at = float("-inf")


def until(is_so: Callable[[], bool], what: str, run: Running) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while not is_so():
        assert run.process.poll() is None, run.output()[-3000:]
        assert time.monotonic() < deadline, f"no sign of {what}: {run.output()[-3000:]}"
        time.sleep(1)
