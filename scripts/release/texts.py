"""The two files that a release changes: the version in pyproject.toml, and the changelog."""

import re
from datetime import date

from packaging.version import Version

from scripts.release.errors import ReleaseError

PROJECT, CHANGELOG = "pyproject.toml", "CHANGELOG.md"
_VERSION = re.compile(r'^version = "(?P<version>[^"]+)"$', re.MULTILINE)
_UNRELEASED = re.compile(r"^## Unreleased\n(?P<body>.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^## (?P<version>\d+(?:\.\d+)+\S*) - \d{4}-\d{2}-\d{2}$", re.MULTILINE)


def with_version(project: str, version: Version) -> str:
    """pyproject.toml with another version. Raises ReleaseError."""
    if len(_VERSION.findall(project)) != 1:
        raise ReleaseError(f'{PROJECT} must have one line `version = "..."`')
    return _VERSION.sub(f'version = "{version}"', project)


def notes_of(changelog: str) -> str:
    """The section of unreleased changes. Raises ReleaseError if it is missing or has no entry."""
    found = _UNRELEASED.search(changelog)
    if found is None:
        raise ReleaseError(f"{CHANGELOG} has no section `## Unreleased`: add one above the last version")
    if not re.search(r"^- ", found["body"], re.MULTILINE):
        raise ReleaseError(f"the section Unreleased of {CHANGELOG} is empty: there is nothing to release")
    return found["body"].strip() + "\n"


def with_heading(changelog: str, version: Version, day: date) -> str:
    """The changelog with its unreleased changes under the version, and an empty section above."""
    return changelog.replace("## Unreleased\n", f"## Unreleased\n\n## {version} - {day.isoformat()}\n", 1)


def described_versions(changelog: str) -> list[Version]:
    """Versions with a heading in the changelog."""
    return sorted(Version(found["version"]) for found in _HEADING.finditer(changelog))
