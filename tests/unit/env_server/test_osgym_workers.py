"""`env-server osgym start|stop|status` without desktops: the ports, the process, and the processes left alone."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from env_server import osgym_workers
from env_server.main import main
from env_server.osgym_workers import NOT_RUNNING, STATE_FILE, WorkersState, host_for, read_ports, read_state
from env_server.settings import SettingsError

NAME = "env_server.main --osgym-ports 20000"
"""What a process may be called, and is not ended for."""
SLEEP = "import time; time.sleep(60)"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"

Sleeper = Callable[[str], subprocess.Popen[bytes]]


@pytest.fixture
def sleeper() -> Iterator[Sleeper]:
    started: list[subprocess.Popen[bytes]] = []

    def start(code: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-S", "-c", code, NAME], stdout=subprocess.PIPE)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def remember(folder: Path, pid: int, **changes: object) -> None:
    state = WorkersState(
        pid=pid,
        start_ticks=osgym_workers._start_ticks(pid) or 0,
        boot_id=osgym_workers._boot_id(),
        ports=(20000, 20001),
        host="127.0.0.1",
    )
    (folder / STATE_FILE).write_text(json.dumps({**asdict(state), **changes}))


def osgym(*words: str | Path) -> int:
    return main(["osgym", *map(str, words)])


def test_stop_ends_exactly_the_remembered_process(
    tmp_path: Path, sleeper: Sleeper, capsys: pytest.CaptureFixture[str]
) -> None:
    mine, decoy = sleeper(SLEEP), sleeper(SLEEP)
    remember(tmp_path, mine.pid)
    assert osgym("stop", "--state-dir", tmp_path) == 0
    assert mine.wait(5) == -15
    assert decoy.poll() is None
    assert not (tmp_path / STATE_FILE).exists()
    assert osgym("stop", "--state-dir", tmp_path) == 0
    said = capsys.readouterr().out.splitlines()
    assert said == [f"OSGym's workers are stopped (process {mine.pid})", "OSGym's workers are not running"]
    assert decoy.poll() is None


def test_with_json_the_answers_are_objects(
    tmp_path: Path, sleeper: Sleeper, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(*words: str) -> tuple[int, dict[str, object]]:
        exit_status = osgym(*words, "--state-dir", tmp_path, "--json")
        return exit_status, json.loads(capsys.readouterr().out)

    mine = sleeper(SLEEP)
    remember(tmp_path, mine.pid)
    known = {"pid": mine.pid, "host": "127.0.0.1", "ports": [20000, 20001]}
    (tmp_path / "config.yaml").write_text("ports: [20000, 20001]")
    begun = {**known, "is_new": False, "log": str(tmp_path / "osgym.log")}
    assert answer("start", "--local", "--config", str(tmp_path / "config.yaml")) == (0, begun)
    assert answer("status") == (0, {"status": "starting", **known})
    assert answer("stop") == (0, {"pid": mine.pid, "was_killed": False})
    assert answer("stop") == (0, {"pid": None, "was_killed": False})
    assert answer("status") == (NOT_RUNNING, {"status": "stopped"})


def test_stop_kills_what_does_not_end_in_time(
    tmp_path: Path, sleeper: Sleeper, capsys: pytest.CaptureFixture[str]
) -> None:
    stubborn = sleeper(STUBBORN)
    assert stubborn.stdout is not None
    stubborn.stdout.readline()
    remember(tmp_path, stubborn.pid)
    assert osgym("stop", "--state-dir", tmp_path, "--grace-s", "0.2") == 0
    assert stubborn.wait(5) == -9
    assert "killed" in capsys.readouterr().out


@pytest.mark.parametrize("changes", [{"start_ticks": 1}, {"boot_id": "another boot"}])
def test_unrelated_process_with_the_same_number_is_left_alone(
    tmp_path: Path, sleeper: Sleeper, changes: dict[str, object]
) -> None:
    stranger = sleeper(SLEEP)
    remember(tmp_path, stranger.pid, **changes)
    assert osgym("status", "--state-dir", tmp_path) == NOT_RUNNING
    assert osgym("stop", "--state-dir", tmp_path) == 0
    time.sleep(0.1)
    assert stranger.poll() is None


def test_zombie_process_does_not_count_as_running(tmp_path: Path, sleeper: Sleeper) -> None:
    process = sleeper("")
    remember(tmp_path, process.pid)
    deadline = time.monotonic() + 5
    while read_state(tmp_path) is not None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert process.returncode is None


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"pid": 1}', '{"ports": 5}'])
def test_state_that_cannot_be_read_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / STATE_FILE).write_text(text)
    assert read_state(tmp_path) is None


@pytest.mark.parametrize(
    ("allowed", "is_local", "host"),
    [
        ("", False, "127.0.0.1"),
        ("127.0.0.1", False, "127.0.0.1"),
        ("127.0.0.1, ::1", False, "127.0.0.1"),
        ("127.0.0.1, 10.0.0.0/24", False, "0.0.0.0"),
        ("10.0.0.7", True, "127.0.0.1"),
    ],
)
def test_ports_are_bound_beyond_loopback_only_for_a_client_on_another_machine(
    allowed: str, is_local: bool, host: str
) -> None:
    assert host_for({"OSGYM_ALLOWED_IPS": allowed}, is_local=is_local) == host


def test_start_reports_that_the_workers_already_run(
    tmp_path: Path, sleeper: Sleeper, capsys: pytest.CaptureFixture[str]
) -> None:
    running = sleeper(SLEEP)
    remember(tmp_path, running.pid)
    (tmp_path / "config.yaml").write_text("ports: [20000, 20001]")
    assert osgym("start", "--config", tmp_path / "config.yaml", "--state-dir", tmp_path, "--local") == 0
    said = capsys.readouterr().out
    assert said == f"OSGym's workers are already running: process {running.pid}, 2 ports, 20000 to 20001 on 127.0.0.1\n"
    assert running.poll() is None


def test_start_without_a_list_of_addresses_fails_in_one_sentence_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OSGYM_ALLOWED_IPS", raising=False)
    (tmp_path / "config.yaml").write_text("ports: [20000]")
    assert osgym("start", "--config", tmp_path / "config.yaml", "--state-dir", tmp_path) == 1
    (sentence,) = capsys.readouterr().err.splitlines()
    assert "refusing to serve OSGym's ports to all addresses: set OSGYM_ALLOWED_IPS" in sentence
    assert read_state(tmp_path) is None
    assert not (tmp_path / STATE_FILE).exists()


def test_start_that_takes_too_long_ends_the_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-in for the server is never ready, and writes its process number to a file."""
    stand_in = tmp_path / "python"
    stand_in.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 60\n")
    stand_in.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stand_in))
    (tmp_path / "config.yaml").write_text("ports: [20000]")
    assert osgym("start", "--config", tmp_path / "config.yaml", "--state-dir", tmp_path, "--wait-s", "0.5") == 1
    assert "was not ready within 0.5 s and was ended" in capsys.readouterr().err
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    assert not (tmp_path / STATE_FILE).exists()


def test_wrong_option_of_the_server_is_reported_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text("ports: [20000]")
    with pytest.raises(SystemExit):
        osgym("start", "--config", tmp_path / "config.yaml", "--state-dir", tmp_path, "--providr", "local")
    assert "--providr" in capsys.readouterr().err
    assert osgym("stop", "--state-dir", tmp_path, "--provider", "local") == 1
    assert "osgym stop has no option '--provider'" in capsys.readouterr().err


def test_ports_are_read_from_osgyms_own_file(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("ports: [20000, 20001,\n        20002]")
    assert read_ports(path) == (20000, 20001, 20002)


@pytest.mark.parametrize(
    "text",
    ["", "ports:", "ports: []", "ports: [a]", "ports: [1, 1]", "ports: [70000]", "ports: 5", "- 1", "a: [", "\t"],
)
def test_file_without_ports_is_refused_with_one_clear_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(SettingsError, match=r"config\.yaml"):
        read_ports(path)


def test_missing_file_is_refused_with_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"give OSGym's config\.yaml with --config"):
        read_ports(tmp_path / "none.yaml")


def test_state_file_is_accessible_only_to_its_owner(tmp_path: Path) -> None:
    state = WorkersState(pid=1, start_ticks=1, boot_id="b", ports=(1,), host="h")
    osgym_workers._write_state(tmp_path, state)
    assert (tmp_path / STATE_FILE).stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == [STATE_FILE]
