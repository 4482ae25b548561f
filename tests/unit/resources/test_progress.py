"""Progress lines are written into a log and read back from it."""

from hypothesis import given
from hypothesis import strategies as st

from resources.progress import ProgressLine

COUNTS = st.integers(min_value=0, max_value=10**9)
NOTES = st.text().map(str.strip)


@given(done=COUNTS, total=COUNTS, note=NOTES)
def test_a_progress_line_reads_back_as_it_was_written(done: int, total: int, note: str) -> None:
    line = ProgressLine(stage="evaluate gspo_phase1", done=done, total=total, note=note)
    assert ProgressLine.parse(str(line)) == line


def test_another_log_line_is_no_progress() -> None:
    assert ProgressLine.parse("train_sft writes to var/logs/train_sft.log") is None
