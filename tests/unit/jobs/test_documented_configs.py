"""Dagster accepts every run configuration in the docs as a file."""

import re
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest
import yaml

from osworld_pipeline.definitions import defs

ROOT = Path(__file__).resolve().parents[3]
BLOCK = re.compile(r"^```yaml\n(.*?)^```", re.DOTALL | re.MULTILINE)


def documented() -> Iterator[tuple[str, str]]:
    """(page and number, text) of the blocks that configure resources."""
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for number, text in enumerate(BLOCK.findall(page.read_text())):
            if text.startswith("resources:"):
                yield f"{page.name}-{number}", text


CONFIGS = dict(documented())


def test_the_docs_have_at_least_three_run_configurations() -> None:
    assert len(CONFIGS) >= 3


@pytest.mark.parametrize("name", CONFIGS)
def test_a_documented_run_configuration_is_accepted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in re.findall(r"env: (\w+)", CONFIGS[name]):
        monkeypatch.setenv(variable, "a secret")
    dg.validate_run_config(defs.resolve_job_def("train"), yaml.safe_load(CONFIGS[name]))


def test_a_run_configuration_with_an_unknown_key_is_refused() -> None:
    with pytest.raises(dg.DagsterInvalidConfigError):
        dg.validate_run_config(
            defs.resolve_job_def("train"), yaml.safe_load("resources: {launcher: {config: {place: {local: {}}}}}")
        )
