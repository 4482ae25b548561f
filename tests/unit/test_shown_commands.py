"""What commands print for people: ids are whole at any width, and a command says what it does before it starts."""

import io
from pathlib import Path

import click
import pytest
from checkpoint_samples import lay_down, make_checkpoint, write_evaluation
from rich.cells import cell_len
from rich.console import Console

from osworld_pipeline.domain.checkpoint import Stage
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import PipelineError
from osworld_pipeline.recipes import load_recipe
from osworld_pipeline.tables.checkpoints import upsert_checkpoint

"""Typer uses, while it is imported, what a later click will not have."""

MILESTONE, PARENT = "gspo_phase2-fd466df85180-u0012", "gspo_phase1-45f5bdb698d3-u0008"
ROW = {"checkpoint": MILESTONE, "stage": "gspo_phase2", "updates": "12", "parent": PARENT, "path": f"var/{MILESTONE}"}


def a_terminal(width: int, term: str = "xterm") -> Console:
    return Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None, _environ={"TERM": term})


def lines_of(console: Console) -> list[str]:
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def call(state: Path, *arguments: str) -> None:
    from osworld_pipeline.cli import app

    app([*arguments, "--state", str(state)], standalone_mode=False)


@pytest.mark.parametrize(
    ("width", "reported"),
    [
        (200, None),
        (110, "too wide for this terminal: path (--json has all)"),
        (80, "too wide for this terminal: path, stage (--json has all)"),
        (40, "too wide for this terminal: path, stage (--json has all)"),
    ],
)
def test_checkpoints_are_listed_with_whole_ids_at_any_width(width: int, reported: str | None) -> None:
    from osworld_pipeline.cli.shown import show_table

    console = a_terminal(width)
    show_table([ROW, {**ROW, "path": "[bold]there[/]"}], console, spare=["path", "stage"])
    head, first, second, *rest = lines_of(console)
    assert (MILESTONE in first, PARENT in first) == (True, True)
    assert ("path" in head, "[bold]there[/]" in second, rest) == (
        reported is None,
        reported is None,
        [reported] if reported else [],
    )
    assert width < 80 or max(map(cell_len, (head, first, second))) <= width


def test_a_dumb_terminal_shows_whole_ids() -> None:
    from osworld_pipeline.cli.shown import show_table

    console = a_terminal(80, term="dumb")
    show_table([{**ROW, "parent": "p" * 90}], console)
    assert lines_of(console)[1].split() == [*list(ROW.values())[:3], "p" * 90, ROW["path"]]


def test_output_that_is_not_a_terminal_gets_every_column_on_one_line() -> None:
    from osworld_pipeline.cli.shown import show_table

    console = Console(file=io.StringIO(), width=80)
    show_table([ROW], console, spare=["path", "stage"])
    assert lines_of(console)[1].split() == list(ROW.values())


def test_scores_fit_into_80_columns_with_a_table_for_each_suite() -> None:
    from osworld_pipeline.cli.shown import ScoreLine, show_scores

    console = a_terminal(80)
    score = ScoreLine(
        suite="osworld-test_small",
        checkpoint=MILESTONE,
        success=1.0,
        interval=(0.8, 1.0),
        strict=0.9,
        num_success=18,
        num_valid=18,
        num_faults=2,
    )
    fault = score._replace(suite="mine", success=None, interval=(None, None), strict=0.0, num_success=0, num_valid=0)
    show_scores([score, score, fault], console)
    lines = lines_of(console)
    row = [MILESTONE, "100.0%", "80.0%", "-", "100.0%", "90.0%", "18/18", "2"]
    assert [lines[0], lines[2].split(), lines[3].split()] == ["suite osworld-test_small", row, row]
    assert [lines[4], lines[6].split()] == ["suite mine", [MILESTONE, "-", "-", "0.0%", "0/0", "2"]]
    assert max(map(cell_len, lines)) <= 80


def test_checkpoint_list_is_whole_where_a_program_reads_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lay_down(StateDir(tmp_path), make_checkpoint(MILESTONE, Stage.GSPO_PHASE2, parent_id=PARENT))
    call(tmp_path, "checkpoint", "list")
    row = [MILESTONE, "gspo_phase2", "4", PARENT, f"checkpoints/{MILESTONE}"]
    assert capfd.readouterr().out.splitlines()[1].split() == row


def test_the_planned_evaluation_is_described_in_one_sentence() -> None:
    from osworld_pipeline.cli.shown import planned_evaluations

    assert planned_evaluations(["sft-1"], "suite heldout", recipe="smoke", num_tasks=2, num_seeds=2) == (
        "sft-1 on suite heldout, with recipe smoke: 4 episodes (2 tasks, 2 seeds); finished ones are not repeated"
    )
    assert planned_evaluations(["a-1", "b-1"], "heldout", recipe="smoke", num_tasks=2, num_seeds=1) == (
        "a-1, b-1 on heldout, with recipe smoke: 4 episodes (2 checkpoints, 2 tasks, 1 seed); "
        "finished ones are not repeated"
    )


@pytest.mark.parametrize(
    ("arguments", "reported"),
    [
        (("evaluate", "--checkpoint", "sft-2"), r"no checkpoint 'sft-2' in .*; did you mean 'sft-1'\?"),
        (("evaluate", "--suite", "heldot"), r"no suite 'heldot'.*; did you mean 'heldout'\?"),
        (
            ("evaluate", "--set", "evaluation.sede=1"),
            r"unknown key `evaluation.sede`; did you mean `evaluation.seeds`\?",
        ),
        (("evaluate",), r"there is no dagster\.yaml in .*osworld-pipeline init`"),
        (("backfill", "--checkpoints", "sft-1,sft-2"), r"no checkpoint 'sft-2' in .*; did you mean 'sft-1'\?"),
        (("backfill", "--suites", "heldout,heldot"), r"no suite 'heldot'.*; did you mean 'heldout'\?"),
        (("backfill",), r"there is no dagster\.yaml in .*osworld-pipeline init`"),
        (("collect", "--checkpoint", "sft-2"), r"no checkpoint 'sft-2' in .*; did you mean 'sft-1'\?"),
        (("collect", "--oracle", "--suite", "heldot"), r"no suite 'heldot'.*; did you mean 'heldout'\?"),
        (("collect", "--oracle"), r"there is no dagster\.yaml in .*osworld-pipeline init`"),
        (("demo", "--set", "sft.num_update=1"), r"unknown key `sft.num_update`; did you mean `sft.num_updates`\?"),
        (("demo",), r"there is no dagster\.yaml in .*osworld-pipeline init`"),
    ],
)
def test_every_mistake_is_found_before_anything_is_printed(
    tmp_path: Path, arguments: tuple[str, ...], reported: str, capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    lay_down(StateDir(tmp_path), make_checkpoint("sft-1"))
    monkeypatch.chdir(tmp_path)  # no Dagster instance is here, so nothing starts
    with pytest.raises(PipelineError, match=reported):
        call(tmp_path, *arguments, "--recipe", "smoke")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("arguments", "reported"),
    [
        (["evalute"], "No such command 'evalute'. Did you mean 'evaluate'?"),
        (["checkpoint", "lst"], "No such command 'lst'. Did you mean 'list'?"),
        (["export", "huggingfase"], "No such command 'huggingfase'. Did you mean 'huggingface'?"),
    ],
)
def test_a_similar_command_is_suggested_once(arguments: list[str], reported: str) -> None:
    from osworld_pipeline.cli import app

    with pytest.raises(click.UsageError) as refused:
        app(arguments, standalone_mode=False)
    assert refused.value.format_message() == reported


def test_a_result_file_that_cannot_be_written_is_refused_before_anything_runs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(click.UsageError, match="cannot be written"):
        call(tmp_path, "evaluate", "--recipe", "smoke", "--output", str(tmp_path / "file" / "result.json"))
    assert capfd.readouterr() == ("", "")


def test_no_password_of_an_address_is_shown(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(PipelineError, match="holds a user name or a password") as refused:
        call(tmp_path, "evaluate", "--recipe", "smoke", "--checkpoint", "https://me:secret@models.example/v1#big")
    assert "secret" not in f"{refused.value}{capfd.readouterr()}"


def test_report_all_prints_every_page_as_it_is_written(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    state = StateDir(tmp_path)
    upsert_checkpoint(state, make_checkpoint("sft-0123456789ab"))
    write_evaluation(state, load_recipe("smoke"), "sft-0123456789ab", num_successes=1)
    call(tmp_path, "report", "--all", "--recipe", "smoke")
    out, err = capfd.readouterr()
    first, *reported = err.splitlines()
    assert first == "pages of evaluations, of suites, and of 1 training run"
    assert [line.split()[-1] for line in reported] == [Path(line).name for line in out.splitlines()]
    assert len(reported) == 4
