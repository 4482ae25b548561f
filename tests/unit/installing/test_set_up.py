"""What `setup` installs, and what it prints where it has no permission to install."""

import json
import os
import pty
import shutil
import subprocess
import sys
import venv
from importlib import resources
from pathlib import Path

import pytest
from typer.testing import CliRunner

from osworld_pipeline.cli import app
from osworld_pipeline.domain.remedies import DEBIAN_PARTS, ENVIRONMENTS, missing_package
from osworld_pipeline.domain.top_level_names import ROOT
from osworld_pipeline.errors import DependencyError
from osworld_pipeline.installing import debian_command
from osworld_pipeline.installing.environments import DESKTOP_ENV, KINDS, SGLANG, make_environment

SCRIPT = str(resources.files("osworld_pipeline.installing") / "debian.sh")


@pytest.fixture
def lacking(tmp_path: Path) -> dict[str, str]:
    """Variables of a machine on which no Debian package is installed, and no sudo."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("bash", "dirname", "awk", "grep", "cat"):
        (programs / name).symlink_to(str(shutil.which(name)))
    for name, text in {"dpkg-query": "exit 0", "id": "echo 1000"}.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    return {**os.environ, "PATH": str(programs)}


def run(*words: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", SCRIPT, *words], env=environment, capture_output=True, text=True, timeout=30, check=False
    )


def test_every_part_of_setup_has_its_package_lists() -> None:
    names = {item.name for item in resources.files("osworld_pipeline.installing").iterdir()}
    assert {f"debian-packages-{part}.txt" for part in DEBIAN_PARTS} <= names
    assert set(KINDS) == set(ENVIRONMENTS)
    assert all(path.is_file() for kind in KINDS.values() for path in kind.lists)


def test_packages_are_named_first_and_an_administrator_gets_the_command(lacking: dict[str, str]) -> None:
    done = run("wine", "extras", environment=lacking)
    assert done.returncode == 1
    named, refused = done.stderr.splitlines()
    assert named.endswith("Debian packages to install: wine wine64 chromium ffmpeg")
    assert refused.endswith(
        "as root, run: apt-get update && apt-get install -y --no-install-recommends wine wine64 chromium ffmpeg"
    )


def test_a_dry_run_prints_only_the_command(lacking: dict[str, str]) -> None:
    done = run("--dry-run", "wine", environment=lacking)
    assert (done.returncode, done.stdout) == (
        0,
        "apt-get update && apt-get install -y --no-install-recommends wine wine64\n",
    )


def test_a_dry_run_with_json_prints_an_object(
    lacking: dict[str, str], monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    monkeypatch.setenv("PATH", lacking["PATH"])
    app(["setup", "wine", "sglang", "--folder", "/there", "--dry-run", "--json"], standalone_mode=False)
    said = capfdbinary.readouterr()
    assert json.loads(said.out) == {
        "parts": ["wine", "sglang"],
        "is_dry_run": True,
        "command": "apt-get update && apt-get install -y --no-install-recommends wine wine64",
        "environments": [{"name": "sglang", "folder": "/there", "size": "3 GB", "is_made": False}],
    }
    assert said.err == b""


def test_with_json_the_error_has_the_command_for_an_administrator(
    lacking: dict[str, str], monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    monkeypatch.setenv("PATH", lacking["PATH"])
    with pytest.raises(DependencyError, match="as root, run: apt-get update && apt-get install"):
        app(["setup", "wine", "--json"], standalone_mode=False)
    assert capfdbinary.readouterr() == (b"", b"")


def test_a_machine_without_dpkg_is_refused_with_the_systems_that_are_needed(
    lacking: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (Path(lacking["PATH"]) / "dpkg-query").unlink()
    monkeypatch.setenv("PATH", lacking["PATH"])
    with pytest.raises(DependencyError, match="the desktops need Debian or Ubuntu"):
        debian_command(["wine"])


def test_without_pip_the_command_for_uv_installs_pip_first(tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv/bin/python"
    # Only our modules, without the packages that are installed next to them.
    code = "from osworld_pipeline.domain.remedies import how_to_set_up; print(how_to_set_up('uv'))"
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/nowhere"}
    said = subprocess.run([python, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert said.stdout == f"{python} -m ensurepip && {python} -m pip install uv\n"


def test_an_unknown_part_is_refused(lacking: dict[str, str]) -> None:
    assert run("cooking", environment=lacking).returncode == 1
    done = CliRunner().invoke(app, ["setup", "cooking"])
    assert done.exit_code == 2
    assert "no part named 'cooking'" in done.output.replace("\n", " ")


def test_a_folder_that_is_not_an_environment_is_left_unchanged(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").touch()
    with pytest.raises(DependencyError, match="is not a Python environment: choose another folder"):
        make_environment(SGLANG, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_another_package_list_gives_another_environment() -> None:
    assert SGLANG.digest() != DESKTOP_ENV.digest()


def test_a_missing_module_names_the_extra_that_installs_it() -> None:
    assert "setup python" in str(missing_package("torch.cuda")) or "[train]" in str(missing_package("torch.cuda"))
    assert "dagster is not installed here; run `" in str(missing_package("dagster"))
    assert missing_package("my_own_module") is None
    assert missing_package("moto") is None, "only tests need it"


def fake_apt(tmp_path: Path, lacking: dict[str, str]) -> dict[str, str]:
    """The same machine, with root and an apt-get that prints its arguments."""
    for name, text in {
        "id": "echo 0",
        "env": 'while [[ $1 == *=* ]]; do shift; done; "$@"',
        "apt-get": 'echo "$@"',
    }.items():
        (tmp_path / "programs" / name).write_text(f"#!{shutil.which('bash')}\n{text}\n")
        (tmp_path / "programs" / name).chmod(0o755)
    return lacking


def test_apt_shows_its_own_progress_only_on_a_terminal(lacking: dict[str, str], tmp_path: Path) -> None:
    environment = fake_apt(tmp_path, lacking)
    piped = run("wine", environment=environment)
    assert (piped.returncode, piped.stdout) == (0, "")
    assert len(piped.stderr.splitlines()) == 1, "the names of the packages"
    ours, theirs = pty.openpty()
    try:
        shown = subprocess.run(
            ["bash", SCRIPT, "wine"], env=environment, stdout=subprocess.PIPE, stderr=theirs, timeout=30, check=True
        )
        named, installed = os.read(ours, 10_000).decode().splitlines()
    finally:
        os.close(ours)
        os.close(theirs)
    assert shown.stdout == b""
    assert "Debian packages to install: wine wine64" in named
    assert installed.endswith("install -y --no-install-recommends wine wine64")


@pytest.mark.parametrize("is_quiet", [True, False])
def test_uv_is_quiet_if_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_quiet: bool) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    uv = programs / "uv"
    uv.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/calls\n[ "$1" = venv ]\n')
    uv.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(programs / "python"))
    with pytest.raises(DependencyError, match="could not be installed"):
        make_environment(SGLANG, tmp_path / "environment", is_quiet=is_quiet)
    calls = (tmp_path / "calls").read_text().splitlines()
    assert [call.split()[0] for call in calls] == ["venv", "pip"]
    assert ["--quiet" in call.split() for call in calls] == [is_quiet, is_quiet]
