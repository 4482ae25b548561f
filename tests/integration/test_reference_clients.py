"""The clients of Slime-OSWorld, OSGym and AReaL, unchanged, against the env server on real desktops.

Their checkouts are not part of this repository: OSWORLD_PEERS names a folder that holds slime/, osgym/ and areal/. With
OSWORLD_TRANSCRIPTS, the output of each client is kept in that folder."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from env_server_process import RunningServer, running_env_server

pytestmark = [
    pytest.mark.desktop,
    pytest.mark.slow,
    pytest.mark.skipif("OSWORLD_PEERS" not in os.environ, reason="OSWORLD_PEERS names no folder with checkouts"),
]

PROGRAMS = Path(__file__).parent / "reference_clients"
LIMIT_S = 150
TASK_ID = "e0df059f-28a6-4169-924f-b9623e7184cc"
LINE = "mv ~/Desktop/todo_list_Jan_1 ~/Desktop/todo_list_Jan_2"
OWN_TASK = {
    "id": "rename-folder",
    "instruction": "Rename the folder todo_list_Jan_1 on the Desktop to todo_list_Jan_2.",
    "config": [{"type": "execute", "parameters": {"command": "mkdir -p ~/Desktop/todo_list_Jan_1", "shell": True}}],
    "evaluator": {
        "func": "exact_match",
        "result": {"type": "vm_command_line", "command": "ls ~/Desktop", "shell": True},
        "expected": {"type": "rule", "rules": {"expected": "todo_list_Jan_2\n"}},
    },
}
"""Where OSWorld's task of the same kind is not at hand."""


@dataclass(frozen=True, kw_only=True)
class Peers:
    checkouts: Path
    server: RunningServer
    ports: list[int]

    def checkout(self, name: str) -> Path:
        path = self.checkouts / name
        if not path.is_dir():
            pytest.skip(f"there is no {path}")
        return path


@pytest.fixture(scope="module")
def peers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peers]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(2)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        ports = [each.getsockname()[1] for each in sockets]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OSGYM_ALLOWED_IPS", "127.0.0.1,::1")
        options = ("--osgym-ports", ",".join(map(str, ports)), "--osgym-replicas-per-port", "1")
        with running_env_server(tmp_path_factory.mktemp("peers"), *options, num_replicas=2) as server:
            yield Peers(checkouts=Path(os.environ["OSWORLD_PEERS"]), server=server, ports=ports)


@pytest.fixture
def task(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    real = Path(__file__).resolve().parents[3] / "shared/data/osworld/evaluation_examples/examples/os"
    path = tmp_path / "task.json"
    published = real / f"{TASK_ID}.json"
    path.write_text(published.read_text() if published.exists() else json.dumps(OWN_TASK))
    return path


def run_client(program: str, *arguments: str, cwd: Path, stubs: Mapping[str, str] = {}, **environment: str) -> str:
    """What the client said; `stubs` are modules that it imports and does not need here."""
    for name, text in stubs.items():
        path = cwd / "stubs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    ended = subprocess.run(
        [sys.executable, "-u", str(PROGRAMS / program), *arguments], cwd=cwd, timeout=LIMIT_S, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": str(cwd / "stubs"), **environment},
    )  # fmt: skip
    kept = os.environ.get("OSWORLD_TRANSCRIPTS")
    if kept:
        Path(kept).mkdir(parents=True, exist_ok=True)
        (Path(kept) / f"{program.partition('_')[0]}.txt").write_text(ended.stdout)
    assert ended.returncode == 0, ended.stdout[-3000:]
    return ended.stdout


def test_slimes_http_client_solves_a_task(peers: Peers, task: Path, tmp_path: Path) -> None:
    stubs = {"slime/__init__.py": "", "slime/utils/__init__.py": "", "slime/utils/types.py": "class Sample: ...\n"}
    arguments = (str(peers.checkout("slime")), str(task), LINE)
    said = run_client("slime_client.py", *arguments, cwd=tmp_path, stubs=stubs, OSWORLD_SERVER_URL=peers.server.url)
    assert said.endswith("slime: ok\n")


def test_areals_remote_desktop_env_solves_a_task(peers: Peers, task: Path, tmp_path: Path) -> None:
    logging = "from logging import *\n"
    stubs = {"areal/__init__.py": "", "areal/utils/__init__.py": "", "areal/utils/logging.py": logging}
    said = run_client(
        "areal_client.py", str(peers.checkout("areal")), str(task), LINE, peers.server.url, cwd=tmp_path, stubs=stubs
    )
    assert said.endswith("areal: ok\n")


def test_osgyms_worker_passes_its_own_test_script_and_solves_a_task(peers: Peers, task: Path, tmp_path: Path) -> None:
    tasks = tmp_path / "examples" / "env_configs" / "libreoffice_calc"
    tasks.mkdir(parents=True)
    (tasks / "task.json").write_text(task.read_text())
    (tmp_path / "config.yaml").write_text(f"ports: {peers.ports}\n")
    said = run_client("osgym_client.py", str(peers.checkout("osgym")), LINE, cwd=tmp_path / "examples")
    assert "All workers completed" in said
    assert said.count("finish successful") == 2
    assert "encountered error" not in said
    assert "retrying" not in said
    assert said.endswith("osgym: ok\n")
