"""The record of which code ran, read from real git repositories."""

import subprocess
from pathlib import Path

import pytest

from osworld_pipeline.tracking.code import CodeOrigin, origin_of


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *identity, "-C", str(folder), *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    package = tmp_path / "osworld_pipeline"
    package.mkdir()
    (package / "__init__.py").write_text("")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    return tmp_path


def test_a_clean_checkout_is_recorded_as_its_commit(checkout: Path) -> None:
    assert origin_of(checkout) == CodeOrigin(version=git(checkout, "rev-parse", "HEAD"), is_dirty=False)


def test_a_changed_or_a_new_module_makes_a_checkout_dirty_and_other_files_do_not(checkout: Path) -> None:
    (checkout / "notes.txt").write_text("mine")
    assert origin_of(checkout).is_dirty is False
    new = checkout / "osworld_pipeline" / "new.py"
    new.write_text("")
    assert origin_of(checkout).is_dirty is True
    new.unlink()
    (checkout / "osworld_pipeline" / "__init__.py").write_text("changed = 1")
    assert origin_of(checkout).is_dirty is True


def test_an_untracked_package_in_a_checkout_is_recorded_as_its_distribution(checkout: Path) -> None:
    installed = checkout / "venv" / "osworld_pipeline"
    installed.mkdir(parents=True)
    (installed / "__init__.py").write_text("")
    origin = origin_of(installed.parent)
    assert origin.is_dirty is None
    assert origin.version.startswith("osworld-pipeline")


def test_a_folder_that_is_not_a_checkout_is_recorded_as_its_distribution(tmp_path: Path) -> None:
    assert origin_of(tmp_path).is_dirty is None
