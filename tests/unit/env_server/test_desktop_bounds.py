"""Where a desktop's control group is made, on machines of every kind, and what it holds."""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from env_server.providers.bounds import Bounds, DesktopLimits, Group
from osworld_pipeline.errors import ReplicaError

LIMITS = DesktopLimits(memory_bytes=512 << 20, num_processes=100)


def machine(tmp_path: Path, *, cgroup: str, mounts: list[tuple[str, str, Path, str]]) -> Path:
    """A /proc/self with `cgroup`, and mounts of (kind, root, folder, options)."""
    proc = tmp_path / "proc"
    proc.mkdir()
    (proc / "cgroup").write_text(cgroup)
    lines = [f"30 20 0:1 {root} {at} rw shared:1 - {kind} none rw,{options}" for kind, root, at, options in mounts]
    (proc / "mountinfo").write_text("".join(f"{line}\n" for line in lines))
    for _, _, folder, _ in mounts:
        folder.mkdir(parents=True)
    return proc


def empty_groups(top: Path) -> None:
    """Removes the files in the groups; a real group's files vanish with it."""
    for path in [path for path in top.rglob("osworld-desktop-*/*") if path.is_file()]:
        path.unlink()


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}


def test_version_two_uses_the_servers_own_group_if_it_delegates_its_controllers(tmp_path: Path) -> None:
    own = tmp_path / "fs/user.slice/app"
    proc = machine(tmp_path, cgroup="0::/user.slice/app\n", mounts=[("cgroup2", "/", tmp_path / "fs", "nsdelegate")])
    own.mkdir(parents=True)
    (own / "cgroup.subtree_control").write_text("cpu memory pids\n")
    bounds = Bounds.open(LIMITS, proc=proc)
    try:
        assert bounds.description == "control group v2: 512 MiB of memory, 100 processes, an equal share of CPU time"
        group = bounds.make_group()
        assert group is not None
        assert [folder.parent for folder in group.folders] == [own]
        assert contents(group.folders[0]) == {"memory.max": str(512 << 20), "pids.max": "100"}
        assert group.entering(["a", "b"])[-3:] == ["--", "a", "b"]
    finally:
        empty_groups(own)
        bounds.close()
    assert list(own.glob("osworld-desktop-*")) == []


def test_version_one_takes_a_folder_in_both_hierarchies(tmp_path: Path) -> None:
    fs = tmp_path / "fs"
    proc = machine(
        tmp_path,
        cgroup="8:pids:/\n4:memory:/docker/abc/inner\n0::/\n",
        mounts=[
            ("cgroup", "/docker/abc", fs / "memory", "memory"),
            ("cgroup", "/", fs / "pids", "pids"),
            ("cgroup2", "/", fs / "unified", ""),
        ],
    )
    (fs / "memory/inner").mkdir()
    bounds = Bounds(LIMITS, version=1, bases=(fs / "memory/inner", fs / "pids"))
    group = bounds.make_group()
    assert group is not None
    assert [contents(folder) for folder in group.folders] == [
        {"memory.limit_in_bytes": str(512 << 20)},
        {"pids.max": "100"},
    ]
    opened = Bounds.open(LIMITS, proc=proc)
    assert opened.description.startswith("control group v1")
    empty_groups(fs)
    opened.close()


@pytest.mark.parametrize("is_one_folder", [True, False])
def test_version_one_shares_cpu_time_if_the_cpu_hierarchies_are_mounted(tmp_path: Path, is_one_folder: bool) -> None:
    fs = tmp_path / "fs"
    names = ["cpu,cpuacct"] if is_one_folder else ["cpu", "cpuacct"]
    proc = machine(
        tmp_path,
        cgroup="".join(f"9:{name}:/a\n" for name in names) + "7:pids:/\n4:memory:/\n",
        mounts=[("cgroup", "/", fs / name, name) for name in ("memory", "pids", *names)],
    )
    for name in names:
        (fs / name / "a").mkdir()
    bounds = Bounds.open(DesktopLimits(max_cpus=1.5), proc=proc)
    group = bounds.make_group()
    assert group is not None
    assert bounds.shares_cpu
    assert "an equal share of CPU time, at most 1.5 CPUs" in bounds.description
    quota = {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "150000"}
    assert {folder.parent: contents(folder) for folder in group.folders[2:]} == (
        {fs / names[0] / "a": quota} if is_one_folder else {fs / "cpu/a": quota, fs / "cpuacct/a": {}}
    )
    (group.folders[2] / "cpu.shares").write_text("1024")
    (group.folders[-1] / "cpuacct.usage").write_text("2500000000")
    group.weigh_cpu(1 / 32)
    assert (group.folders[2] / "cpu.shares").read_text() == "32"
    assert group.cpu_time_s() == 2.5
    empty_groups(fs)
    bounds.close()


def test_version_two_sets_quota_and_weight(tmp_path: Path) -> None:
    own = tmp_path / "fs"
    proc = machine(tmp_path, cgroup="0::/\n", mounts=[("cgroup2", "/", own, "")])
    (own / "cgroup.subtree_control").write_text("cpu memory pids")
    bounds = Bounds.open(DesktopLimits(max_cpus=0.5), proc=proc)
    group = bounds.make_group()
    assert group is not None
    assert contents(group.folders[0])["cpu.max"] == "50000 100000"
    (group.folders[0] / "cpu.weight").write_text("100")
    (group.folders[0] / "cpu.stat").write_text("usage_usec 1500000\nuser_usec 1\n")
    group.weigh_cpu(1 / 32)
    assert (group.folders[0] / "cpu.weight").read_text() == "3"
    assert group.cpu_time_s() == 1.5
    empty_groups(own)
    bounds.close()


def usage(most_mb: int, limit_mb: int) -> dict[str, str]:
    return {"memory.max_usage_in_bytes": f"{most_mb << 20}\n", "memory.limit_in_bytes": f"{limit_mb << 20}\n"}


@pytest.mark.parametrize(
    ("files", "whose"),
    [
        ({"memory.events": "low 0\nhigh 0\nmax 9\noom 2\noom_kill 1\n"}, "own"),
        ({"memory.events": "low 0\nhigh 0\nmax 0\noom 0\noom_kill 1\n"}, "host"),
        ({"memory.events": "low 0\nhigh 0\nmax 9\noom 2\noom_kill 0\n"}, None),
        ({"memory.oom_control": "under_oom 0\noom_kill 1\n", **usage(500, 500)}, "own"),
        ({"memory.oom_control": "under_oom 0\noom_kill 1\n", **usage(498, 500)}, "own"),
        ({"memory.oom_control": "under_oom 0\noom_kill 0\n", **usage(500, 500)}, None),
        ({"memory.oom_control": "under_oom 0\noom_kill 1\n", **usage(400, 500)}, "host"),
        ({}, None),
    ],
)
def test_the_groups_own_limit_shows_whose_memory_ran_out(
    tmp_path: Path, files: dict[str, str], whose: str | None
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert Group((tmp_path,)).out_of_memory() == whose


def test_a_group_that_cannot_be_made_later_is_an_error_and_not_a_desktop_without_bounds(tmp_path: Path) -> None:
    bounds = Bounds(LIMITS, version=2, bases=(tmp_path / "gone",))
    with pytest.raises(ReplicaError, match="no control group can be made for a desktop"):
        bounds.make_group()


@pytest.mark.parametrize("cgroup", ["", "0::/\n", "4:memory:/a\n"])
def test_a_machine_without_control_groups_says_why_single_processes_are_bounded(tmp_path: Path, cgroup: str) -> None:
    bounds = Bounds.open(LIMITS, proc=machine(tmp_path, cgroup=cgroup, mounts=[]))
    assert bounds.description == "limits per process only, no control group can be made (no control groups are mounted)"
    assert bounds.make_group() is None
    bounds.close()


def test_a_group_that_cannot_be_made_is_reported_with_its_path(tmp_path: Path) -> None:
    fs = tmp_path / "fs"
    proc = machine(
        tmp_path,
        cgroup="8:pids:/gone\n4:memory:/gone\n",
        mounts=[("cgroup", "/", fs / "memory", "memory"), ("cgroup", "/", fs / "pids", "pids")],
    )
    bounds = Bounds.open(LIMITS, proc=proc)
    assert f"{fs}/memory/gone/osworld-desktop-" in bounds.description
    assert "No such file" in bounds.description


def test_groups_of_a_dead_server_are_removed_and_those_of_a_living_one_are_not(tmp_path: Path) -> None:
    own = tmp_path / "fs"
    proc = machine(tmp_path, cgroup="0::/\n", mounts=[("cgroup2", "/", own, "")])
    (own / "cgroup.subtree_control").write_text("memory pids")
    dead = subprocess.Popen(["/bin/true"])
    dead.wait()
    (own / f"osworld-desktop-{dead.pid}-abc-0").mkdir()
    (own / f"osworld-desktop-{os.getppid()}-abc-0").mkdir()
    bounds = Bounds.open(LIMITS, proc=proc)
    empty_groups(own)
    bounds.close()
    assert [path.name for path in own.iterdir() if path.is_dir()] == [f"osworld-desktop-{os.getppid()}-abc-0"]


@pytest.mark.parametrize("limits", [{"memory_bytes": 1 << 20}, {"num_processes": 8}, {"max_cpus": 0.01}])
def test_limits_too_small_for_a_desktop_are_refused(limits: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="a desktop needs"):
        DesktopLimits(**limits)


async def test_a_real_group_holds_what_is_started_in_it_and_is_gone_afterwards() -> None:
    bounds = Bounds.open(LIMITS)
    try:
        group = bounds.make_group()
        if group is None:
            pytest.skip(f"this machine: {bounds.description}")
        argv = group.entering(["cat", "/proc/self/cgroup"])
        process = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)
        seen = (await process.communicate())[0].decode()
        assert all(folder.name in seen for folder in group.folders)
        await group.remove()
        await group.remove()
        assert not any(folder.exists() for folder in group.folders)
    finally:
        bounds.close()


def test_a_server_that_is_killed_leaves_no_group() -> None:
    code = (
        "from env_server.providers.bounds import *; import time; b = Bounds.open(DesktopLimits()); g = b.make_group();"
        "print(*(g.folders if g else ()), flush=True); time.sleep(60)"
    )
    python = [sys.executable, "-c", code]
    with subprocess.Popen(python, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        folders = [Path(word) for word in server.stdout.readline().split()]
        there = [folder.exists() for folder in folders]
        server.kill()
    if not folders:
        pytest.skip("this machine lets no control group be made")
    assert all(there)
    until = time.monotonic() + 5
    while any(folder.exists() for folder in folders):
        assert time.monotonic() < until, folders
        time.sleep(0.05)
