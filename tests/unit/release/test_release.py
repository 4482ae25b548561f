"""A release of a small project in its own repository, with real Git and real builds. Only the checks are replaced."""

import hashlib
import signal
import subprocess
import sys
import zipfile
from datetime import date
from pathlib import Path

import pytest

from scripts.release.errors import ReleaseError
from scripts.release.steps import CHECKS, Request, release

PASSES = ((sys.executable, "-c", ""),)
PROJECT = """\
[build-system]
requires = ["uv_build>=0.13,<0.14"]
build-backend = "uv_build"

[project]
name = "tiny"
version = "0.1.0"
description = "A tiny project."
readme = "README.md"
requires-python = ">=3.11"
license-files = ["LICENSE"]

[tool.uv.build-backend]
module-root = ""
module-name = ["tiny"]
"""
CHANGELOG = """\
# Changelog

## Unreleased
### Added
- A thing.

## 0.1.0 - 2026-01-02
### Added
- The first thing.
"""
FILES = {
    "pyproject.toml": PROJECT, "CHANGELOG.md": CHANGELOG, "README.md": "Tiny.\n", "LICENSE": "Free.\n",
    "tiny/__init__.py": "", "tiny/data.txt": "data\n", ".gitignore": "dist/\n",
    "tests/states/0.2.0.tar.xz": "", "tests/states/0.2.0.json": "",
}  # fmt: skip
KILLED = """
import os, signal, sys
from datetime import date
from pathlib import Path
from scripts.release.repository import Repository
from scripts.release.steps import Request, release

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

setattr(Repository, sys.argv[2], die)
release(Request(root=Path(sys.argv[1]), version="0.2.0", day=date(2026, 11, 25)), ())
"""


def git(root: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.strip()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "tiny"
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    git(root, "init", "--quiet", "--initial-branch", "main")
    for name, value in (("user.name", "A"), ("user.email", "a@example.org"), ("commit.gpgsign", "false")):
        git(root, "config", name, value)
    commit(root, "Begin")
    return root


def commit(root: Path, subject: str) -> None:
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "-m", subject)


def everything(root: Path) -> dict[str, str | bytes]:
    """References, the index, and the files of the checkout."""
    files = {str(path): path.read_bytes() for path in root.rglob("*") if path.is_file() and ".git" not in path.parts}
    return {**files, "refs": git(root, "for-each-ref"), "status": git(root, "status", "--porcelain")}


def request(root: Path, version: str = "0.2.0", *, is_dry_run: bool = False) -> Request:
    return Request(root=root, version=version, day=date(2026, 11, 25), is_dry_run=is_dry_run)


def test_a_release_builds_tags_and_describes_the_version(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    release(request(root), PASSES)
    assert 'version = "0.2.0"' in (root / "pyproject.toml").read_text()
    text = "# Changelog\n\n## Unreleased\n\n## 0.2.0 - 2026-11-25\n### Added\n- A thing.\n\n## 0.1.0 - 2026-01-02\n"
    assert (root / "CHANGELOG.md").read_text().startswith(text)
    assert git(root, "status", "--porcelain") == ""
    assert git(root, "log", "--format=%s") == "Release 0.2.0\nBegin"
    assert git(root, "diff", "--name-only", "HEAD^").split() == ["CHANGELOG.md", "pyproject.toml"]
    assert git(root, "cat-file", "-t", "v0.2.0") == "tag"
    assert git(root, "rev-parse", "v0.2.0^{commit}") == git(root, "rev-parse", "main")
    assert git(root, "for-each-ref", "--format=%(contents)", "refs/tags/v0.2.0") == "0.2.0\n\n### Added\n- A thing."
    dist = root / "dist"
    wheel, sdist = dist / "tiny-0.2.0-py3-none-any.whl", dist / "tiny-0.2.0.tar.gz"
    assert {path.name for path in dist.iterdir()} == {wheel.name, sdist.name, "SHA256SUMS", "notes.md"}
    assert (dist / "notes.md").read_text() == "### Added\n- A thing.\n"
    sums = dict(reversed(line.split("  ")) for line in (dist / "SHA256SUMS").read_text().splitlines())
    assert sums == {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (wheel, sdist)}
    assert "tiny/data.txt" in zipfile.ZipFile(wheel).namelist()
    assert "git push origin HEAD v0.2.0" in capsys.readouterr().out


def test_a_dry_run_shows_the_release_and_changes_nothing(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = everything(root)
    release(request(root, is_dry_run=True), ((sys.executable, "-c", "raise SystemExit('this check ran')"),))
    assert everything(root) == before
    shown = capsys.readouterr().out
    for part in ("would run: ", "tiny-0.2.0.tar.gz", "'## 0.2.0 - 2026-11-25'", "tag v0.2.0", "- A thing."):
        assert part in shown


def changed(root: Path) -> None:
    (root / "tiny" / "new.py").write_text("")


def without_entries(root: Path) -> None:
    (root / "CHANGELOG.md").write_text(CHANGELOG.replace("### Added\n- A thing.\n", "### Added\n", 1))
    commit(root, "Empty")


def without_section(root: Path) -> None:
    (root / "CHANGELOG.md").write_text(CHANGELOG.replace("## Unreleased\n", "## Later\n", 1))
    commit(root, "Lose")


def tagged(root: Path) -> None:
    git(root, "tag", "v0.3.0")


def without_state(root: Path) -> None:
    (root / "tests" / "states" / "0.2.0.tar.xz").unlink()
    commit(root, "Forget")


def with_a_stray_file(root: Path) -> None:
    """Adds a tracked file that is not built, because the backend leaves such files out."""
    (root / "tiny" / "__pycache__").mkdir()
    (root / "tiny" / "__pycache__" / "old.pyc").write_text("")
    commit(root, "Stray")


@pytest.mark.parametrize(
    ("prepare", "version", "words"),
    [
        (changed, "0.2.0", r"the checkout has changes \(tiny/new.py\): commit them"),
        (without_entries, "0.2.0", "the section Unreleased of CHANGELOG.md is empty"),
        (without_section, "0.2.0", "no section `## Unreleased`"),
        (tagged, "0.2.0", r"0\.2\.0 is not above the last one, 0\.3\.0"),
        (None, "0.1.0", r"0\.1\.0 is not above the last one, 0\.1\.0"),
        (None, "0.0.9", r"0\.0\.9 is not above the last one, 0\.1\.0"),
        (None, "next", "'next' is no version"),
        (without_state, "0.2.0", r"no tests/states/0\.2\.0\.tar\.xz.* run `python tests/states/make.py 0\.2\.0`"),
        (with_a_stray_file, "0.2.0", r"missing: tiny/__pycache__/old.pyc;"),
    ],
)
def test_a_refusal_says_why_and_changes_nothing(root: Path, prepare, version: str, words: str) -> None:
    if prepare is not None:
        prepare(root)
    before = everything(root)
    with pytest.raises(ReleaseError, match=words):
        release(request(root, version), PASSES)
    assert everything(root) == before


def test_a_failed_check_stops_before_anything_changes(root: Path) -> None:
    before = everything(root)
    with pytest.raises(ReleaseError, match="failed with status 3; nothing was changed"):
        release(request(root), (*PASSES, (sys.executable, "-c", "raise SystemExit(3)")))
    assert everything(root) == before


@pytest.mark.parametrize("command", ["touch tiny/left.txt", "git commit --quiet --allow-empty -m more"])
def test_a_checkout_that_changes_during_the_checks_is_not_released(root: Path, command: str) -> None:
    with pytest.raises(ReleaseError, match=r"HEAD has moved|has changes"):
        release(request(root), (command.split(),))
    assert git(root, "tag") == ""


@pytest.mark.parametrize("step", ["export", "commit", "tag"])
def test_a_kill_before_the_tag_leaves_everything_unchanged(root: Path, step: str) -> None:
    before = {name: value for name, value in everything(root).items() if "/dist/" not in name}
    done = subprocess.run([sys.executable, "-c", KILLED, str(root), step], timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert {name: value for name, value in everything(root).items() if "/dist/" not in name} == before
    release(request(root), PASSES)


def test_a_kill_after_the_tag_leaves_one_missing_command_that_the_next_call_names(root: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(root), "fast_forward"], timeout=60)
    assert done.returncode == -signal.SIGKILL
    with pytest.raises(ReleaseError, match=r"run `git merge --ff-only v0\.2\.0`"):
        release(request(root), PASSES)
    git(root, "merge", "--quiet", "--ff-only", "v0.2.0")
    assert 'version = "0.2.0"' in (root / "pyproject.toml").read_text()
    with pytest.raises(ReleaseError, match="not above the last one"):
        release(request(root), PASSES)


def test_the_checks_of_a_real_release_are_those_of_the_makefile_and_the_packages() -> None:
    repository = Path(__file__).resolve().parents[3]
    assert CHECKS[0] == ("make", "check")
    files = [word for words in CHECKS for word in words if word.startswith("tests/")]
    assert files
    assert all((repository / name).is_file() for name in files)
