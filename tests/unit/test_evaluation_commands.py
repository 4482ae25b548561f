"""Wrong calls of `evaluate`, `collect`, `report` and `checkpoint`: each mistake is reported before any desktop is
started."""

import json
from pathlib import Path
from typing import Any

import click
import pytest
from checkpoint_samples import lay_down, make_checkpoint
from pasted import pasted

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import DatasetError, PipelineError, TableError
from osworld_pipeline.object_store import RemoteNote, write_note

"""Typer uses, while it is imported, what a later click will not have."""


def call(state: Path, *arguments: str) -> None:
    from osworld_pipeline.cli import app

    app([*arguments, "--state", str(state)], standalone_mode=False)


def error_of(state: Path, *arguments: str) -> PipelineError:
    with pytest.raises(PipelineError) as refused:
        call(state, *arguments, "--recipe", "smoke")
    return refused.value


@pytest.mark.parametrize(
    ("arguments", "reported"),
    [
        (("evaluate", "--suite", "heldout", "--tasks", "t.json"), "both select the tasks"),
        (("evaluate", "--seeds", "one"), "comma-separated whole numbers"),
        (("collect", "--oracle", "--checkpoint", "sft-1"), "both select the policy"),
        (("evaluate", "--max-tasks", "0"), "0 is not in the range"),
        (("report", "--training", "sft", "--suite", "heldout"), "give one of them"),
        (("report", "--all", "--training", "sft"), "give one of them"),
        (("report", "--checkpoints", "sft-1", "--suite", "heldout"), "--checkpoints applies"),
    ],
)
def test_options_that_contradict_each_other_are_a_usage_error(
    tmp_path: Path, arguments: tuple[str, ...], reported: str
) -> None:
    with pytest.raises(click.UsageError) as refused:
        call(tmp_path, *arguments)
    assert reported in refused.value.format_message()


def test_without_any_checkpoint_evaluate_says_what_to_name(tmp_path: Path) -> None:
    error = error_of(tmp_path, "evaluate")
    assert isinstance(error, TableError)
    assert pasted(str(error))[:3] == ["train", "--recipe", "smoke"]


def test_an_unknown_suite_is_refused_with_a_list_of_existing_suites(tmp_path: Path) -> None:
    lay_down(StateDir(tmp_path), make_checkpoint("sft-1"))
    for command in ("evaluate", "collect"):
        error = error_of(tmp_path, command, "--suite", "mine")
        assert isinstance(error, DatasetError)
        assert "no suite 'mine': there are heldout" in str(error)


def test_oracle_on_tasks_of_a_file_is_refused_before_it_starts(tmp_path: Path) -> None:
    task = {"id": "t1", "instruction": "Do it.", "evaluator": {"func": "infeasible"}}
    (tmp_path / "tasks.json").write_text(json.dumps([task]))
    error = error_of(tmp_path, "collect", "--oracle", "--tasks", str(tmp_path / "tasks.json"))
    assert "there is no oracle for task t1" in str(error)


def test_a_report_without_any_evaluation_says_so(tmp_path: Path) -> None:
    lay_down(StateDir(tmp_path), make_checkpoint("sft-1"))
    assert pasted(str(error_of(tmp_path, "report")))[0] == "evaluate"
    assert "no checkpoint 'sft-2'" in str(error_of(tmp_path, "report", "--checkpoints", "sft-2"))


def test_endpoint_is_added_and_listed(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    def answer(*arguments: str) -> Any:
        call(tmp_path, "checkpoint", *arguments, "--json")
        return json.loads(capfdbinary.readouterr().out)

    card = answer("add", "http://127.0.0.1:9/v1#m")
    assert answer("list") == [card]
    assert (card["stage"], card["path"]) == ("external", "http://127.0.0.1:9/v1#m")


def test_evaluate_on_a_cache_requires_a_named_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    write_note(tmp_path, RemoteNote(url="s3://bucket/runs", role="cache"))
    StateDir(tmp_path).catalog.touch()
    with pytest.raises(click.BadParameter, match="is a cache of an object store: name a checkpoint"):
        call(tmp_path, "evaluate", "--recipe", "smoke")
