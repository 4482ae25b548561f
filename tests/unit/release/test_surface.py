"""docs/versions.md promises: this version has all that a released version had, unless the page names it as removed."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version
from released_states import VERSIONS
from states.surface import surface

from osworld_pipeline.columns import OLDEST_READ, SCHEMA_VERSION
from osworld_pipeline.remote import manifest as remote
from osworld_pipeline.store import format_note
from osworld_pipeline.training.weights import manifest as weights
from scripts.release.texts import described_versions

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "versions.md").read_text()
WIDER = {"int8": {"int32", "int64"}, "int32": {"int64"}}
"""By Arrow type, the types that hold all of its values."""


@pytest.fixture(scope="module")
def present() -> dict[str, Any]:
    return surface()


@pytest.fixture(params=VERSIONS)
def released(request: pytest.FixtureRequest) -> dict[str, Any]:
    return json.loads((ROOT / "tests" / "states" / f"{request.param}.json").read_text())


@pytest.mark.parametrize("kind", ["options", "recipe_keys", "requests"])
def test_everything_that_was_removed_is_named_on_the_page(
    present: dict[str, Any], released: dict[str, Any], kind: str
) -> None:
    gone = set(released[kind]) - set(present[kind])
    assert {name for name in gone if f"`{name}`" not in PAGE} == set()


def test_columns_are_not_removed_or_narrowed(present: dict[str, Any], released: dict[str, Any]) -> None:
    kinds = present["columns"]
    narrowed = {
        name: kind
        for name, kind in released["columns"].items()
        if kinds.get(name) != kind and kinds.get(name) not in WIDER.get(kind, ())
    }
    assert released["schema_version"] < OLDEST_READ or narrowed == {}


def test_columns_change_only_with_the_schema_version(present: dict[str, Any], released: dict[str, Any]) -> None:
    """A new column needs a `since` above SCHEMA_VERSION (columns/), so that older programs leave the files alone."""
    if released["columns"] != present["columns"]:
        assert released["schema_version"] < present["schema_version"]


@pytest.mark.parametrize("module", [format_note, remote, weights])
def test_each_format_is_read_since_this_version_or_the_next(module: Any) -> None:
    versions = [module.READ_SINCE[number] for number in range(1, module.FORMAT + 1)]
    assert len(versions) == len(module.READ_SINCE)
    own = Version(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])
    last = [*own.release, 0, 0]
    following = {str(own), f"{last[0]}.{last[1] + 1}.0", f"{last[0] + 1}.0.0"}
    for text in versions:
        assert Version(text) <= own or text in following


def test_the_page_has_the_formats_that_the_program_has() -> None:
    found = dict(re.findall(r"^\| (.+?) \| (\d+) \|", PAGE, re.MULTILINE))
    assert found == {
        "columns of the parts": str(SCHEMA_VERSION),
        "the trajectories as a whole": str(format_note.FORMAT),
        "a checkpoint's `manifest.json`": str(weights.FORMAT),
        "`remote.json` on an object store": str(remote.FORMAT),
    }


def test_each_version_of_the_changelog_has_a_state_and_the_newest_is_the_project_s() -> None:
    described = described_versions((ROOT / "CHANGELOG.md").read_text())
    assert {str(version) for version in described} <= set(VERSIONS)
    assert str(described[-1]) == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
