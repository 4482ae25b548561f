"""Progress lines are written into a log and read back from it."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resources.progress import WATCHED_TAG, ProgressLine, ProgressResource

COUNTS = st.integers(min_value=0, max_value=10**9)
NOTES = st.text().map(str.strip)


@given(done=COUNTS, total=COUNTS, note=NOTES)
def test_a_progress_line_reads_back_as_it_was_written(done: int, total: int, note: str) -> None:
    line = ProgressLine(stage="evaluate gspo_phase1", done=done, total=total, note=note)
    assert ProgressLine.parse(str(line)) == line


def test_another_log_line_is_no_progress() -> None:
    assert ProgressLine.parse("train_sft writes to var/logs/train_sft.log") is None


@pytest.mark.parametrize(("tags", "num_told"), [({}, 2), ({WATCHED_TAG: "17"}, 100)])
def test_a_log_that_nobody_watches_gets_few_lines(
    tags: dict[str, str], num_told: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """100 lines, three seconds apart up to the last but one; the first and the last are always told."""
    clock = iter(3.0 * number for number in range(100))
    monkeypatch.setattr("resources.progress.time", SimpleNamespace(monotonic=lambda: next(clock)))
    told: list[str] = []
    context: Any = SimpleNamespace(has_tag=lambda name: name in tags, log=SimpleNamespace(info=told.append))
    progress = ProgressResource(every_s=1000.0)
    for number in range(1, 101):
        progress.update(context, ProgressLine(stage="sft", done=number, total=100, note=""))
    assert len(told) == num_told
    assert (told[0], told[-1]) == ("progress of sft: 1/100", "progress of sft: 100/100")
