"""Progress bars show the rate and the time uncut in 80 columns; without a terminal they are printed as lines."""

import io
from uuid import uuid4

import dagster as dg
import pytest
from rich.console import Console
from rich.progress import Progress

from osworld_pipeline.cli.in_process.bars import Bars, log_line, make_progress, shown_rate
from osworld_pipeline.runs.messages import Progress as StageProgress


def played(width: int, *, total: int = 1440, step_s: float = 7.0, num_steps: int = 30) -> Progress:
    """A stage by a clock of its own, an eighth of a percent a step."""
    progress = make_progress(Console(width=width, file=io.StringIO(), force_terminal=True))
    clock = [0.0]
    progress.get_time = lambda: clock[0]
    stage = progress.add_task("evaluate gspo_phase1", total=total, note="update 6: 23/24 episodes succeeded")
    for number in range(1, num_steps + 1):
        clock[0] += step_s
        progress.update(stage, completed=9 * number)
    return progress


def drawn(progress: Progress, width: int) -> str:
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    console.print(progress.make_tasks_table(progress.tasks))
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [80, 120])
def test_bar_shows_count_rate_and_time_that_remains_in_a_terminal_of_any_width(width: int) -> None:
    (line,) = drawn(played(width), width).splitlines()
    assert len(line.rstrip()) <= width
    for whole in ("evaluate gspo_phase1", "270/1440", "1.3/s", "0:15:10"):
        assert whole in line
    assert "update 6" in line


def test_bar_that_is_full_shows_how_long_it_took() -> None:
    assert "0:03:30" in drawn(played(80, total=270), 80)


@pytest.mark.parametrize(
    ("per_s", "shown"), [(250.0, "250/s"), (1.26, "1.3/s"), (0.3, "18/min"), (0.05, "3.0/min"), (0.001, "3.6/h")]
)
def test_a_rate_is_shown_in_a_readable_unit(per_s: float, shown: str) -> None:
    assert shown_rate(per_s) == shown


def test_the_log_has_the_same_figures_as_the_bar_and_leaves_out_unknown_ones() -> None:
    line = StageProgress(stage="evaluate", done=270, total=1440, note="13 successes")
    assert log_line(line, played(80).tasks[0]) == "evaluate: 270/1440, 1.3/s, 0:15:10 to go: 13 successes"
    assert log_line(line, played(80, num_steps=0).tasks[0]) == "evaluate: 270/1440: 13 successes"


def test_the_note_of_the_assets_disappears_when_the_last_step_ends() -> None:
    @dg.asset
    def leaderboard() -> None: ...

    @dg.asset_check(asset=leaderboard)
    def is_whole() -> dg.AssetCheckResult:
        return dg.AssetCheckResult(passed=True)

    progress = make_progress(Console(width=80, file=io.StringIO()))
    bars = Bars(progress)
    bars.expect(1)
    definitions = dg.Definitions(assets=[leaderboard], asset_checks=[is_whole])
    with dg.DagsterInstance.ephemeral() as instance:
        job = definitions.resolve_implicit_global_asset_job_def()
        run_id = str(uuid4())
        instance.add_event_listener(run_id, bars)
        assert job.execute_in_process(instance=instance, run_id=run_id).success
    (assets,) = progress.tasks
    assert (assets.completed, assets.total, assets.fields["note"]) == (1, 1, "")


@pytest.mark.parametrize(
    "note", ["last 128: 100 succeeded", "1000/1000 succeeded", "copying, loss 0.53", "1000 attempts, 1000 kept"]
)
def test_the_notes_of_the_stages_fit_in_80_columns(note: str) -> None:
    """The notes are the longest of each kind that runs/ reports."""
    progress = played(80)
    progress.update(progress.tasks[0].id, note=note)
    assert note in drawn(progress, 80)
