"""Progress bars of long commands are shown on a terminal and nowhere else."""

import fcntl
import io
import os
import pty
import struct
import subprocess
import sys
import termios
from contextlib import suppress
from pathlib import Path

import pytest
from episode_samples import make_episode, make_step
from rich.console import Console
from rich.progress import Progress as Display

from osworld_pipeline.cli.progress import counter, make_columns, shown_progress
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.progress import BYTES, Progress
from osworld_pipeline.store import TrajectoryStore
from osworld_pipeline.tables.catalog import rebuild_catalog

BAR = "━"


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    state = StateDir(tmp_path / "var")
    store = TrajectoryStore(state)
    sha256 = store.write_blob(b"an image", suffix="png")
    store.write_episodes("p", [make_episode("e", steps=(make_step(sha256=sha256),))])
    rebuild_catalog(state)
    return state


def run(*words: str, stdout: int, stderr: int) -> subprocess.CompletedProcess[bytes]:
    environment = {"PATH": os.environ["PATH"], "TERM": "xterm", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "osworld_pipeline.cli", *words]
    return subprocess.run(command, stdout=stdout, stderr=stderr, env=environment, check=True, timeout=60)


def on_terminal(*words: str, pipes_output: bool = False) -> tuple[str, str]:
    """What the terminal receives, and what a pipe of standard output receives."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    try:
        done = run(*words, stdout=subprocess.PIPE if pipes_output else theirs, stderr=theirs)
        os.set_blocking(ours, False)
        received = b""
        with suppress(BlockingIOError):
            while data := os.read(ours, 65_536):
                received += data
    finally:
        os.close(ours)
        os.close(theirs)
    return received.decode(), (done.stdout or b"").decode()


def test_terminal_shows_a_bar_with_what_is_done_and_how_much_and_then_the_result(state: StateDir) -> None:
    text, _ = on_terminal("missing-images", "--state", str(state.root))
    assert "reading the rows of trajectories" in text
    assert BAR in text
    num_files = len(list(state.trajectories.rglob("*.parquet")))
    assert f"{num_files}/{num_files} files" in text
    assert text.rstrip().endswith("no image is missing")


def test_command_without_parts_to_count_shows_its_name(state: StateDir) -> None:
    text, _ = on_terminal("rebuild-catalog", "--state", str(state.root))
    assert "rebuild-catalog" in text
    assert "building the catalog" in text


def test_json_shows_no_bar_on_a_terminal(state: StateDir) -> None:
    text, _ = on_terminal("missing-images", "--state", str(state.root), "--json")
    assert text.split() == ["[]"]


def test_terminal_shows_no_bar_while_the_output_goes_to_a_pipe(state: StateDir) -> None:
    text, output = on_terminal("missing-images", "--state", str(state.root), pipes_output=True)
    assert (text, output) == ("", "no image is missing\n")


def test_pipes_get_no_bar(state: StateDir) -> None:
    done = run("missing-images", "--state", str(state.root), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert (done.stdout, done.stderr) == (b"no image is missing\n", b"")


def test_without_a_terminal_library_code_gets_no_callback() -> None:
    with shown_progress("work") as on_progress:
        assert on_progress is None
        assert counter(on_progress, "reading", BYTES) is None


def test_counter_reports_done_and_total_as_one_kind_of_work() -> None:
    seen: list[Progress] = []
    count = counter(seen.append, "reading", BYTES)
    assert count is not None
    count(1, 2)
    assert seen == [Progress("reading", 1, 2, BYTES)]


@pytest.mark.parametrize(
    ("progress", "shown"),
    [
        (Progress("sending files", 1_200_000_000, 3_400_000_000, BYTES), "1.2 GB/3.4 GB"),
        (Progress("reading episodes", 1_200, 34_000, "files"), "1,200/34,000 files"),
        (Progress("looking for unused objects", 1_200, 0, "objects"), "1,200 objects"),
    ],
)
def test_a_line_shows_its_figures_uncut_in_eighty_columns(progress: Progress, shown: str) -> None:
    display = Display(*make_columns(), console=Console(width=80, file=io.StringIO()))
    display.add_task(progress.what, total=progress.total or None, completed=progress.done, unit=progress.unit)
    console = Console(width=80, file=io.StringIO())
    console.print(display.make_tasks_table(display.tasks))
    (line,) = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert len(line.rstrip()) <= 80
    assert progress.what in line
    assert shown in line
