"""Steps per second of our server and of Slime-OSWorld's, each over the same stub (50 ms a step, a 20 KB picture) on
one port, in alternating order, and the bottleneck of ours."""

import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.processes import BenchmarkError, started, wait_for_ready_file
from benchmarks.spread import Spread, print_table, verdict
from benchmarks.stub_step import STEP_S

PEER_SERVER = Path("tools") / "osworld_env_server.py"
FULL = 0.92
"""A core that is busy for this share of the time counts as full."""
QUEUEING_SHARE = 0.1
"""An overhead above this share of the step counts as queueing."""
LIMIT_MARGIN_S = 180.0
MIN_RATIO, MAX_OVERHEAD_MS, MIN_IDEAL_SHARE = 25.0, 4.0, 0.75
JUDGED_EPISODES, IDEAL_EPISODES = 32, 64


@dataclass(frozen=True, kw_only=True)
class Run:
    """One server under one load for one window."""

    num_episodes: int
    steps_per_s: float
    overhead_ms: Spread
    """Time of each step beyond the stub's 50 ms, the client's share included."""
    server_cores: float
    client_cores: float
    other_cores: float
    """Cores used by the rest of the machine."""
    num_cores: int

    @property
    def ideal_per_s(self) -> float:
        return self.num_episodes / STEP_S

    @property
    def server_ms_per_step(self) -> float:
        return self.server_cores / self.steps_per_s * 1e3

    @property
    def limit(self) -> str:
        """The bottleneck of the steps per second."""
        if self.server_cores >= FULL:
            return "CPU: the server's one core"
        if self.client_cores >= FULL:
            return "CPU: the client's one core"
        if self.server_cores + self.client_cores + self.other_cores >= FULL * self.num_cores:
            return f"CPU: all {self.num_cores} cores ({self.other_cores:.1f} others)"
        if self.overhead_ms.median > QUEUEING_SHARE * STEP_S * 1e3:
            return f"the queue for the server's core, {self.server_cores:.0%} busy"
        return "the 50 ms step"


Server = Callable[[int], AbstractContextManager[tuple[str, int]]]
"""Starts a server for a number of episodes; gives its address and process id."""


@contextmanager
def our_server(num_episodes: int) -> Iterator[tuple[str, int]]:
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        ready = Path(folder) / "ready.json"
        command = [sys.executable, "-m", "benchmarks.stub", "--replicas", str(num_episodes), "--ready-file", str(ready)]
        with started(command) as program:
            yield wait_for_ready_file(ready, program), program.process.pid


def peer_server(checkout: Path) -> Server:
    """Slime-OSWorld's server, run unchanged from a checkout, over a stub of the package that it needs."""
    script = checkout / PEER_SERVER
    if not script.is_file():
        raise BenchmarkError(f"{checkout} is not a checkout of Slime-OSWorld: it has no {PEER_SERVER}")

    @contextmanager
    def serve(num_episodes: int) -> Iterator[tuple[str, int]]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [
            sys.executable, str(script), "--host", "127.0.0.1", "--port", str(port),
            "--max-episodes", str(num_episodes),
        ]  # fmt: skip
        here = Path(__file__).parent
        with started(command, environment={"PYTHONPATH": f"{here / 'peer_stub'}:{here.parent}"}) as program:
            deadline = time.monotonic() + 20.0
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port), 1.0).close()
                    break
                except OSError:
                    if program.process.poll() is not None or time.monotonic() > deadline:
                        raise BenchmarkError(f"the peer's server does not start:\n{program.stderr_tail()}") from None
                    time.sleep(0.05)
            yield f"http://127.0.0.1:{port}", program.process.pid

    return serve


def measure(server: Server, num_episodes: int, *, seconds: float, warm_up_s: float = 1.0) -> Run:
    with server(num_episodes) as (url, pid):
        command = [
            sys.executable, "-m", "benchmarks.load", "--url", url, "--server-pid", str(pid),
            "--episodes", str(num_episodes), "--seconds", str(seconds), "--warm-up-s", str(warm_up_s),
        ]  # fmt: skip
        limit_s = seconds + warm_up_s + LIMIT_MARGIN_S
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
        if done.returncode != 0:
            raise BenchmarkError(f"the load of {num_episodes} episodes failed: {done.stderr.strip()[-600:]}")
    return read_run(json.loads(done.stdout), num_episodes)


def read_run(result: dict[str, Any], num_episodes: int) -> Run:
    window_s = result["window_s"]
    if not result["latencies_s"]:
        raise BenchmarkError(f"no step of {num_episodes} episodes ended within {window_s:.1f} s")
    used_s = result["server_cpu_s"] + result["client_cpu_s"]
    with open("/proc/stat", encoding="ascii") as file:
        num_cores = sum(line.startswith("cpu") for line in file) - 1
    return Run(
        num_episodes=num_episodes,
        steps_per_s=len(result["latencies_s"]) / window_s,
        overhead_ms=Spread.of((latency_s - STEP_S) * 1e3 for latency_s in result["latencies_s"]),
        server_cores=result["server_cpu_s"] / window_s,
        client_cores=result["client_cpu_s"] / window_s,
        other_cores=max(0.0, result["machine_cpu_s"] - used_s) / window_s,
        num_cores=num_cores,
    )


def run_throughput(
    console: Console, *, rounds: int, seconds: float, levels: Sequence[int], peer: Path | None
) -> list[dict[str, Any]]:
    theirs_server = peer_server(peer) if peer is not None else None
    ours: dict[int, list[Run]] = {level: [] for level in levels}
    theirs: dict[int, list[Run]] = {level: [] for level in levels}
    for round_index in range(rounds):
        for level in levels:
            sides: list[tuple[Server, list[Run]]] = [(our_server, ours[level])]
            if theirs_server is not None:
                sides.append((theirs_server, theirs[level]))
            for server, runs in sides if round_index % 2 == 0 else reversed(sides):
                runs.append(measure(server, level, seconds=seconds))
    _print_runs(console, ours, theirs, rounds=rounds, seconds=seconds)
    _print_verdicts(console, ours, theirs)
    return [
        {"bench": "throughput", "server": name, **_fields(run)}
        for name, side in (("ours", ours), ("slime", theirs))
        for runs in side.values()
        for run in runs
    ]


def _fields(run: Run) -> dict[str, Any]:
    return {
        "episodes": run.num_episodes,
        "steps_per_s": round(run.steps_per_s, 2),
        "ideal_per_s": run.ideal_per_s,
        "overhead_ms": run.overhead_ms.fields(),
        "server_cores": round(run.server_cores, 3),
        "client_cores": round(run.client_cores, 3),
        "other_cores": round(run.other_cores, 3),
        "limit": run.limit,
    }


def _print_runs(
    console: Console, ours: dict[int, list[Run]], theirs: dict[int, list[Run]], *, rounds: int, seconds: float
) -> None:
    rows = []
    for level, runs in ours.items():
        speed = Spread.of(run.steps_per_s for run in runs)
        peer = Spread.of(run.steps_per_s for run in theirs[level]) if theirs[level] else None
        rows.append(
            (
                str(level),
                speed.range_text(0),
                "not measured" if peer is None else peer.range_text(),
                "" if peer is None else f"{_ratio(ours[level], theirs[level]).range_text()}x",
                f"{speed.median / runs[0].ideal_per_s:.0%}",
                Spread.of(run.overhead_ms.median for run in runs).range_text(),
                Spread.of(run.overhead_ms.quantile(0.95) for run in runs).range_text(),
                Spread.of(run.server_ms_per_step for run in runs).range_text(2),
                f"{Spread.of(run.server_cores for run in runs).median:.0%}"
                f" / {Spread.of(run.client_cores for run in runs).median:.0%}",
                max((run.limit for run in runs), key=[run.limit for run in runs].count),
            )
        )
    columns = (
        "episodes", "ours, steps/s", "Slime-OSWorld", "ratio", "of n/0.05", "overhead p50", "overhead p95, ms",
        "CPU ms a step", "server / client core", "limited by",
    )  # fmt: skip
    title = f"Throughput, one port, stub of 50 ms and 20 KB: median (min-max) of {rounds} rounds of {seconds:g} s"
    print_table(console, title, columns, rows)


def _ratio(ours: list[Run], theirs: list[Run]) -> Spread:
    """Ratio round by round, because both sides of a round ran under the same conditions."""
    return Spread.of(mine.steps_per_s / peer.steps_per_s for mine, peer in zip(ours, theirs, strict=True))


def _print_verdicts(console: Console, ours: dict[int, list[Run]], theirs: dict[int, list[Run]]) -> None:
    judged = ours.get(JUDGED_EPISODES, [])
    if judged and theirs[JUDGED_EPISODES]:
        ratio = _ratio(judged, theirs[JUDGED_EPISODES]).median
        console.print(
            f"  {JUDGED_EPISODES} episodes: {ratio:.1f}x (at least {MIN_RATIO:g}x): {verdict(ratio >= MIN_RATIO)}"
        )
    if judged:
        overhead = Spread.of(run.overhead_ms.median for run in judged).median
        is_met = overhead <= MAX_OVERHEAD_MS
        console.print(
            f"  {JUDGED_EPISODES} episodes: overhead p50 {overhead:.1f} ms (at most {MAX_OVERHEAD_MS:g}): "
            + verdict(is_met)
        )
    for run in ours.get(IDEAL_EPISODES, [])[:1]:
        share = Spread.of(other.steps_per_s for other in ours[IDEAL_EPISODES]).median / run.ideal_per_s
        is_met = share >= MIN_IDEAL_SHARE
        note = verdict(True) if is_met else f"limited by {run.limit}"
        console.print(f"  {IDEAL_EPISODES} episodes: {share:.0%} of the ideal (at least {MIN_IDEAL_SHARE:.0%}): {note}")
