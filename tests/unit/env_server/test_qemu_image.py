"""What a machine's image is made of, and how it is built: completely or not at all."""

import io
import tarfile
import threading
import time
from importlib import resources
from pathlib import Path

import pytest

from env_server.providers.files import keep_newest, locked
from env_server.providers.qemu.apt_sources import host_sources
from env_server.providers.qemu.build import build_image, find_image
from env_server.providers.qemu.guest_files import digest_of, guest_archive
from env_server.providers.qemu.recipe import DESKTOP_PACKAGES, SUITE, recipe_digest
from osworld_pipeline.errors import DependencyError

ONLY_LOCAL = {"xvfb", "bubblewrap"}
"""The X server and the walls of a local desktop; a machine is its own walls and has a display."""


def test_a_machine_has_the_programs_of_a_local_desktop() -> None:
    listed = (resources.files("osworld_pipeline.installing") / "debian-packages-debian.txt").read_text().splitlines()
    packages = {line.split()[0] for line in listed if line.strip() and not line.startswith("#")}
    assert set(DESKTOP_PACKAGES) == packages - ONLY_LOCAL


def fake_disk(work: Path) -> None:
    for name in ("disk.qcow2", "vmlinuz", "initrd.img"):
        (work / "out" / name).write_bytes(name.encode())
    (work / "out" / "packages").write_text("bash 5.2\nsudo 1.9\n")


def test_parallel_builders_build_once(tmp_path: Path) -> None:
    made: list[Path] = []

    def make(work: Path) -> None:
        made.append(work)
        time.sleep(0.1)
        fake_disk(work)

    builders = [threading.Thread(target=build_image, args=(tmp_path,), kwargs={"make": make}) for _ in range(3)]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join()
    assert len(made) == 1
    image = find_image(tmp_path)
    assert image is not None
    assert image.disk.read_bytes() == b"disk.qcow2"
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [f"base-{recipe_digest()[:24]}"]


def test_a_build_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def make(work: Path) -> None:
        (work / "out" / "disk.qcow2").write_bytes(b"half")
        raise DependencyError("mmdebstrap failed")

    with pytest.raises(DependencyError, match="mmdebstrap failed"):
        build_image(tmp_path, make=make)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_files_that_a_killed_builder_left_are_removed_by_the_next_one(tmp_path: Path) -> None:
    (tmp_path / ".base-killed" / "out").mkdir(parents=True)
    build_image(tmp_path, make=fake_disk)
    assert not (tmp_path / ".base-killed").exists()


def test_a_base_image_is_named_by_its_package_versions_too(tmp_path: Path) -> None:
    first = build_image(tmp_path / "a", make=fake_disk)

    def newer(work: Path) -> None:
        fake_disk(work)
        (work / "out" / "packages").write_text("bash 5.3\nsudo 1.9\n")

    second = build_image(tmp_path / "b", make=newer)
    assert first.folder.name == second.folder.name
    assert first.digest != second.digest


def test_a_folder_that_cannot_be_written_is_reported_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DependencyError, match="cannot build the machines' image below"):
        build_image(tmp_path / "file" / "images", make=fake_disk)


def test_a_lock_that_stays_taken_is_an_error(tmp_path: Path) -> None:
    with (
        locked(tmp_path / "lock", limit_s=1.0),
        pytest.raises(DependencyError, match="another process has held"),
        locked(tmp_path / "lock", limit_s=0.1),
    ):
        pass
    with locked(tmp_path / "lock", limit_s=0.1):
        pass


def test_only_the_newest_matching_folders_are_kept(tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / f"state-{number}").mkdir()
        (tmp_path / f"state-{number}" / "ram").write_text("")
        time.sleep(0.01)
    (tmp_path / "other").mkdir()
    keep_newest(tmp_path, "state-*", 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "state-2", "state-3"]


def test_the_guest_files_are_the_same_bytes_each_time_and_hold_what_the_agent_needs() -> None:
    archive = guest_archive()
    assert digest_of(archive) == digest_of(guest_archive())
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        members = {member.name: member for member in files.getmembers()}
    assert {"opt/osworld-guest/osworld_guest/vm_init.py", "opt/osworld-guest/pyautogui.py"} <= set(members)
    assert members["home/user/.bashrc"].uid == members["home/user/Desktop"].uid == 1000
    assert members["opt/osworld-guest/osworld_guest/agent.py"].uid == 0
    assert not {"usr/local/bin/sudo", "etc/passwd", "etc/shadow"} & set(members), "a machine has its own"


def test_packages_come_from_the_apt_sources_of_the_host(tmp_path: Path) -> None:
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "sources.list").write_text(
        f"# deb http://commented.example/debian {SUITE} main\n"
        f"deb [arch=amd64 signed-by=/k.gpg] http://mirror.example/debian {SUITE} main contrib\n"
        "deb http://third.example/debian stable main\n"
        f"deb-src http://mirror.example/debian {SUITE} main\n"
    )
    (tmp_path / "sources.list.d" / "debian.sources").write_text(
        f"Types: deb deb-src\nURIs: http://mirror.example/security\nSuites: {SUITE}-security\nComponents: main\n\n"
        f"Types: deb\nURIs: http://off.example/debian\nSuites: {SUITE}\nComponents: main\nEnabled: no\n"
    )
    assert host_sources(tmp_path) == (
        f"deb http://mirror.example/debian {SUITE} main",
        f"deb http://mirror.example/security {SUITE}-security main",
    )


def test_mmdebstrap_chooses_the_sources_if_the_host_has_none_of_this_debian_release(tmp_path: Path) -> None:
    (tmp_path / "sources.list").write_text("deb http://archive.example/ubuntu noble main\n")
    assert host_sources(tmp_path) == ()
