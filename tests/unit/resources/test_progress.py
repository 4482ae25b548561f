"""Progress of a stage: few lines in Dagster's log, and every shown message for the progress bars of this process."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from osworld_pipeline.runs.messages import Info, Progress, Warned
from resources.progress import ProgressResource, watched_progress


class Log:
    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []

    def info(self, text: str) -> None:
        self.lines.append(("info", text))

    def warning(self, text: str) -> None:
        self.lines.append(("warning", text))


@pytest.fixture
def context() -> Any:
    return SimpleNamespace(run=SimpleNamespace(run_id="r1"), log=Log())


@pytest.mark.parametrize(("watched", "num_lines", "num_shown"), [(None, 2, 0), ("r1", 100, 100), ("r2", 2, 0)])
def test_only_a_watched_run_gets_many_lines(
    context: Any, watched: str | None, num_lines: int, num_shown: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """100 messages, three seconds apart up to the last but one; the first and the last are always logged."""
    clock = iter(3.0 * number for number in range(100))
    monkeypatch.setattr("resources.progress.time", SimpleNamespace(monotonic=lambda: next(clock)))
    shown: list[Progress] = []
    progress = ProgressResource(every_s=1000.0)
    with watched_progress(watched, shown.append) if watched else nullcontext():
        for number in range(1, 101):
            progress.update(context, Progress(stage="sft", done=number, total=100))
    assert len(context.log.lines) == num_lines
    assert (context.log.lines[0][1], context.log.lines[-1][1]) == ("progress of sft: 1/100", "progress of sft: 100/100")
    assert [one.done for one in shown] == list(range(1, num_shown + 1))


def test_a_run_is_watched_only_within_the_block(context: Any) -> None:
    shown: list[Progress] = []
    with watched_progress("r1", shown.append):
        pass
    ProgressResource().update(context, Progress(stage="sft", done=1, total=1))
    assert shown == []


def test_a_message_is_shown_under_its_own_stage_or_that_of_its_program(context: Any) -> None:
    shown: list[Progress] = []
    listen = ProgressResource().listener(context, "evaluate")
    with watched_progress("r1", shown.append):
        listen(Progress(done=1, total=2))
        listen(Progress(done=2, total=2, stage="evaluate sft", note="2 successes"))
        listen(Warned(message="a server joined"))
        listen(Info(message="group g0 solved 3 of 4"))
    assert [one.stage for one in shown] == ["evaluate", "evaluate sft"]
    assert context.log.lines == [
        ("info", "progress of evaluate: 1/2"),
        ("info", "progress of evaluate sft: 2/2 2 successes"),
        ("warning", "evaluate: a server joined"),
        ("info", "evaluate: group g0 solved 3 of 4"),
    ]
