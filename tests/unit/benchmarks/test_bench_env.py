"""The benchmark of the env server in its quick mode: its figures are plausible, and it says what limits them."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import bench_env
from benchmarks.processes import BenchmarkError
from benchmarks.spread import Spread
from benchmarks.stub_step import STEP_S
from benchmarks.throughput import Run, measure, our_server, peer_server, run_throughput

PEER = """
import argparse, json
from http.server import BaseHTTPRequestHandler, HTTPServer
from desktop_env.desktop_env import DesktopEnv

env = DesktopEnv()

class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/reset":
            env.reset(body["task_config"])
        else:
            env.step(body["action"], body["pause"])
        answer = b'{"episode_id": "a"}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

parser = argparse.ArgumentParser()
for name in ("--host", "--port", "--max-episodes"):
    parser.add_argument(name)
arguments = parser.parse_args()
HTTPServer((arguments.host, int(arguments.port)), Handler).serve_forever()
"""
"""A server that serves one request at a time, with the peer's command line."""


def test_a_spread_has_a_median_and_extremes() -> None:
    spread = Spread.of([4.0, 1.0, 3.0, 2.0])
    assert (spread.median, spread.quantile(0.0), spread.quantile(1.0)) == (2.5, 1.0, 4.0)
    assert spread.range_text() == "2.5 (1.0-4.0)"
    with pytest.raises(ValueError, match="at least one"):
        Spread.of([])


def test_one_episode_is_no_faster_than_its_desktop_and_loses_few_steps() -> None:
    run = measure(our_server, 1, seconds=1.0, warm_up_s=0.2)
    assert 0.2 / STEP_S < run.steps_per_s <= 1.1 / STEP_S
    assert -1.0 <= run.overhead_ms.median < 100.0


def test_our_server_is_measured_against_a_peer_and_the_ratio_is_printed(tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "osworld_env_server.py").write_text(PEER)
    output = io.StringIO()
    results = run_throughput(Console(file=output, width=200), rounds=1, seconds=0.8, levels=(4,), peer=tmp_path)
    speed = {result["server"]: result["steps_per_s"] for result in results}
    assert speed["slime"] <= 1.3 / STEP_S
    assert speed["ours"] > 2 * speed["slime"]
    assert f"{speed['ours'] / speed['slime']:.1f}" in output.getvalue()


def test_a_folder_that_is_not_a_peer_is_named(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match="not a checkout of Slime-OSWorld"):
        peer_server(tmp_path)


@pytest.mark.parametrize(
    ("server", "client", "others", "overhead", "limit"),
    [
        (0.97, 0.2, 0.0, 30.0, "the server's one core"),
        (0.3, 0.97, 0.0, 30.0, "the client's one core"),
        (0.6, 0.2, 1.1, 30.0, "all 2 cores"),
        (0.6, 0.2, 0.0, 30.0, "the queue for the server's core"),
        (0.2, 0.1, 0.0, 1.0, "the 50 ms step"),
    ],
)
def test_a_run_names_what_limits_it(server: float, client: float, others: float, overhead: float, limit: str) -> None:
    run = Run(
        num_episodes=32, steps_per_s=600.0, overhead_ms=Spread.of([overhead]), server_cores=server,
        client_cores=client, other_cores=others, num_cores=2,
    )  # fmt: skip
    assert limit in run.limit


def test_figures_are_written_to_a_file(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    options = ["throughput", "--rounds", "1", "--seconds", "0.4", "--episodes", "2", "--json", str(file)]
    assert bench_env.main(options) == 0
    reported = json.loads(file.read_text())
    assert reported["machine"]["cores"] >= 1
    assert [result["episodes"] for result in reported["results"]] == [2]
