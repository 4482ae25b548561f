"""Findings about memory, disk, ports and packages."""

import os
import socket
from pathlib import Path

import pytest

from osworld_pipeline.cli.in_process.session import MIN_FREE_BYTES
from osworld_pipeline.doctor import machine, packages, ports
from osworld_pipeline.doctor.machine import check_disk, check_memory, check_open_files
from osworld_pipeline.doctor.packages import check_extra, requirements_of
from osworld_pipeline.doctor.ports import check_port, holders, listening
from osworld_pipeline.domain.finding import Status
from osworld_pipeline.domain.remedies import how_to_set_up, module_of
from osworld_pipeline.domain.state import StateDir

PROC = Path("/proc")


def put_memory(proc: Path, total_gb: int, free_gb: int) -> None:
    proc.mkdir(exist_ok=True)
    (proc / "meminfo").write_text(f"MemTotal: {total_gb * 10**6} kB\nMemAvailable: {free_gb * 10**6} kB\n")


@pytest.mark.parametrize(("free_gb", "status"), [(1, Status.MISSING), (3, Status.WARN), (16, Status.OK)])
def test_memory_is_judged_by_what_is_free(tmp_path: Path, free_gb: int, status: Status) -> None:
    put_memory(tmp_path, 32, free_gb)
    assert check_memory("memory", proc=tmp_path, cgroup=tmp_path / "none").status == status


@pytest.mark.parametrize("version", [1, 2])
def test_a_containers_memory_is_its_limit_and_cached_files_count_as_free(tmp_path: Path, version: int) -> None:
    put_memory(tmp_path / "proc", 64, 60)
    group = tmp_path if version == 2 else tmp_path / "memory"
    names = ("max", "current") if version == 2 else ("limit_in_bytes", "usage_in_bytes")
    group.mkdir(exist_ok=True)
    (group / f"memory.{names[0]}").write_text("4000000000\n")
    (group / f"memory.{names[1]}").write_text("3500000000\n")
    (group / "memory.stat").write_text("inactive_file 2500000000\ntotal_inactive_file 2500000000\n")
    found = check_memory("memory", proc=tmp_path / "proc", cgroup=tmp_path)
    assert found.message == "only 3.1 GB of 4.1 GB memory are free" or "3.0 GB of 4.0 GB" in found.message
    assert found.status == Status.WARN


def test_the_required_disk_space_is_what_the_demo_needs(tmp_path: Path) -> None:
    assert machine.MIN_FREE_BYTES == MIN_FREE_BYTES
    assert "on the disk of" in check_disk("disk", StateDir(tmp_path / "not" / "yet")).message
    assert not (tmp_path / "not").exists()


def test_open_files_are_counted() -> None:
    assert "open files" in check_open_files("open-files").message


def test_a_held_port_is_reported_with_its_process_and_a_free_port_as_free() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        assert list(holders(set(listening(port)))) == [os.getpid()]
        found = check_port("port", port, "MLflow's UI", ("no such program",), "take another", PROC)
        assert found.status == Status.WARN
        assert f"is held by process {os.getpid()}" in found.message
        own = ports.command_of(os.getpid()).split()[0]
        assert check_port("port", port, "MLflow's UI", (own,), "take another", PROC).status == Status.OK
    assert check_port("port", port, "MLflow's UI", (), "take another", PROC).status == Status.OK


def test_a_port_held_by_another_user_is_reported_without_a_process_name(tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    row = "0: 0100007F:0BB8 00000000:0000 0A 00000000:00000000 00:00000000 00000000 0 0 4711 1"
    (tmp_path / "net" / "tcp").write_text(f"header\n{row}\n")
    found = check_port("port-3000", 3000, "Dagster's UI", ("dagster",), "take another", tmp_path)
    assert found.message == "port 3000 (Dagster's UI) is held by a program of another user"


@pytest.mark.parametrize("extra", ["server", "pipeline", "train", "lora", "ray"])
def test_every_package_of_every_extra_has_the_module_that_is_looked_for(extra: str) -> None:
    assert requirements_of(extra)
    found = check_extra(f"packages-{extra}", extra)
    assert found.status in (Status.OK, Status.WARN), found.message


def test_a_package_that_is_missing_old_or_without_its_module_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [
        packages.Requirement(text)
        for text in ("no-such-package>=1", "pydantic>=999", "import-linter>=2", "httpx>=0.1", "pyyaml>=1", "pillow")
    ]
    monkeypatch.setattr(packages, "requirements_of", lambda extra: wanted)
    found = check_extra("packages-server", "server")
    assert found.status == Status.MISSING
    assert "no-such-package is not installed" in found.message
    assert "and not >=999" in found.message
    assert "import-linter" in found.message, "its module is named importlinter"
    assert "httpx" not in found.message
    assert found.remedy == how_to_set_up("server")
    assert module_of("pyyaml") == "yaml"


def test_another_version_than_the_tested_one_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "read_pins", lambda: {"httpx": "0.0.1"})
    found = check_extra("packages-server", "server")
    assert found.status == Status.WARN
    assert "tested: 0.0.1" in found.message


def test_an_extra_that_the_installation_does_not_define_is_missing() -> None:
    assert check_extra("packages-x", "no-such-extra").status == Status.MISSING
