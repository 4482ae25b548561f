"""Launchers of other distributions: they are found by their entry points, and a broken one is named."""

from importlib.metadata import EntryPoint
from typing import Any, Literal

import dagster as dg
import pytest

from osworld_pipeline.errors import DependencyError
from resources import program_launcher
from resources.program_launcher import ENTRY_POINTS, ProgramLauncher, further_launchers


class OtherLauncher(ProgramLauncher):
    kind: Literal["other"] = "other"

    def launch(self, context: dg.AssetExecutionContext, program: str, job: Any, on_message: Any, **more: Any) -> Any:
        raise NotImplementedError


def found(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> dict[str, type[ProgramLauncher]]:
    point = EntryPoint(name=name, value=value, group=ENTRY_POINTS)
    monkeypatch.setattr(program_launcher, "entry_points", lambda *, group: [point] if group == ENTRY_POINTS else [])
    return further_launchers()


def test_an_entry_point_is_a_launcher_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(monkeypatch, "other", f"{__name__}:OtherLauncher") == {"other": OtherLauncher}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("gone", "no_such_module:Launcher", "the launcher 'gone' of .* cannot be imported"),
        ("gone", f"{__name__}:Nothing", "the launcher 'gone' of .* cannot be imported"),
        ("text", f"{__name__}:ENTRY_POINTS", "is not a subclass of"),
        ("another", f"{__name__}:OtherLauncher", 'must have the field kind: Literal."another".'),
    ],
)
def test_a_broken_launcher_is_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str) -> None:
    with pytest.raises(DependencyError, match=message):
        found(monkeypatch, name, value)
