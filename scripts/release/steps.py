"""The steps of a release, in order."""

import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from packaging.version import InvalidVersion, Version

from scripts.release.errors import ReleaseError
from scripts.release.packages import SUMS, build, module_names, need_contents, sums_of
from scripts.release.programs import run_shown
from scripts.release.repository import PREFIX, Repository
from scripts.release.texts import CHANGELOG, PROJECT, described_versions, notes_of, with_heading, with_version

CHECKS: Sequence[Sequence[str]] = (
    ("make", "check"),
    (
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "tests/integration/test_wheel.py",
        "tests/unit/store/test_released_states.py",
    ),
)
CHECK_LIMIT_S = 3600.0
NOTES = "notes.md"


@dataclass(frozen=True, kw_only=True)
class Request:
    root: Path
    version: str
    day: date
    is_dry_run: bool = False


def release(request: Request, checks: Sequence[Sequence[str]]) -> None:
    """`checks`: commands that must succeed on HEAD, whose code is that of the release.

    Raises:
        ReleaseError: the release is refused, or a step failed; says what to do.
    """
    repository = Repository(request.root)
    version = _need_version(request, repository)
    repository.need_clean()
    changelog = (request.root / CHANGELOG).read_text()
    notes = notes_of(changelog)
    _need_state(request.root, version)
    head = repository.head()
    files = {
        PROJECT: with_version((request.root / PROJECT).read_text(), version),
        CHANGELOG: with_heading(changelog, version, request.day),
    }
    for command in checks:
        print(f"{'would run' if request.is_dry_run else 'run'}: {' '.join(command)}", flush=True)
        if not request.is_dry_run:
            run_shown(*command, cwd=request.root, limit_s=CHECK_LIMIT_S)
    if repository.head() != head:
        raise ReleaseError("HEAD has moved while the checks ran: start again")
    repository.need_clean()
    with tempfile.TemporaryDirectory(prefix="release-") as name:
        folder = Path(name)
        tree = repository.tree_with({path: text.encode() for path, text in files.items()})
        _build(repository, tree, folder, files[PROJECT], version)
        (folder / "dist" / NOTES).write_text(notes)
        for path in sorted((folder / "dist").iterdir()):
            print(f"built: {path.name}, {path.stat().st_size:,} bytes")
        if request.is_dry_run:
            _show(files[CHANGELOG], notes, (folder / "dist" / SUMS).read_text(), version)
            return
        commit = repository.commit(tree, head, f"Release {version}\n")
        shutil.rmtree(request.root / "dist", ignore_errors=True)
        shutil.copytree(folder / "dist", request.root / "dist")
    repository.tag(version, commit, f"{version}\n\n{notes}")
    repository.fast_forward(version)
    print(f"{PREFIX}{version} is tagged; packages, {SUMS} and {NOTES} are in dist/")
    print(f"next: git push origin HEAD {PREFIX}{version}")


def _need_version(request: Request, repository: Repository) -> Version:
    """Raises ReleaseError if it is not above every released version, or an earlier call was cut off."""
    try:
        version = Version(request.version)
    except InvalidVersion as error:
        raise ReleaseError(f"'{request.version}' is no version: give three numbers, e.g. 0.2.0") from error
    repository.need_merged(version)
    released = [*repository.versions(), *described_versions((request.root / CHANGELOG).read_text())]
    last = max(released, default=None)
    if last is not None and version <= last:
        raise ReleaseError(f"version {version} is not above the last one, {last}: give a higher one")
    return version


def _need_state(root: Path, version: Version) -> None:
    """Raises ReleaseError if later versions could not be tested with a state of this one."""
    folder = Path("tests", "states")
    missing = [f"{version}{end}" for end in (".tar.xz", ".json") if not (root / folder / f"{version}{end}").is_file()]
    if missing:
        raise ReleaseError(
            f"there is no {folder / missing[0]}, with which later versions are tested: run "
            f"`python tests/states/make.py {version}` and commit what it writes"
        )


def _build(repository: Repository, tree: str, folder: Path, project: str, version: Version) -> None:
    source = folder / "source"
    repository.export(tree, source)
    wheel, sdist = build(source, folder / "dist")
    need_contents(wheel, sdist, repository.names(tree, *module_names(project)), version)
    for path in (folder / "dist").iterdir():
        if path not in (wheel, sdist):
            path.unlink()  # uv writes a .gitignore
    (folder / "dist" / SUMS).write_text(sums_of([wheel, sdist]))


def _show(changelog: str, notes: str, sums: str, version: Version) -> None:
    (heading,) = (line for line in changelog.splitlines() if line.startswith(f"## {version} "))
    print(f"{sums}would write: {PROJECT} with version {version}, {CHANGELOG} with the heading '{heading}'")
    print(f"would commit, tag {PREFIX}{version} and write dist/; the notes:\n{notes}")
