"""Worker processes: the same result as without them, one clear error when one dies, and nothing left after a kill."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from raw_samples import put_lines, put_task, record

from osworld_pipeline.datasets.artefacts import write_union_artefacts
from osworld_pipeline.datasets.lines import Block
from osworld_pipeline.datasets.sources import REPLAY_SOURCES
from osworld_pipeline.datasets.union import replay as union_replay
from osworld_pipeline.datasets.union.blocks import Reading
from osworld_pipeline.datasets.union.build import build_union_tables
from osworld_pipeline.datasets.union.forms import Origin, Setup
from osworld_pipeline.datasets.union.pool import Job, read_blocks_in_order
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import DatasetError
from osworld_pipeline.tables.owned import read_table

SETUP = Setup(form="artefact", system_prompt="p", dialect="slime", max_line_bytes=2**20)


def fill(state: StateDir, *, num_records: int, padding: int = 0) -> None:
    """Every source with `num_records` lines, each third one of them broken or a duplicate of another source's."""
    put_task(state, {"id": "t1", "instruction": "x", "evaluator": {"func": "f"}})
    for place, source in enumerate(REPLAY_SOURCES):
        lines = []
        for index in range(num_records):
            task = f"t{index}" if index % 3 == 0 else f"t{place}-{index}_chunk{index % 4}"
            lines.append("{" if index % 10 == 7 else record(task, note="x" * padding))
        put_lines(state, source.name, lines)


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(claim: object, *, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not claim():  # type: ignore[operator]
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def test_any_number_of_workers_gives_the_same_tables_and_artefacts(tmp_path: Path) -> None:
    found = []
    for num_workers, padding in ((0, 20_000), (2, 20_000)):
        state = StateDir(tmp_path / str(num_workers))
        fill(state, num_records=60, padding=padding)
        assert sum(source.locate(state).stat().st_size for source in REPLAY_SOURCES) > union_replay.SMALL_BYTES
        build_union_tables(state, system_prompt="p", num_workers=num_workers)
        write_union_artefacts(
            state.datasets, state.osworld_repo, state.root / "out", system_prompt="p", num_workers=num_workers
        )
        tables = {name: read_table(state, name) for name in ("union_tasks", "replay_buffer", "train_tasks", "rejects")}
        found.append((tables, {path.name: path.read_bytes() for path in (state.root / "out").iterdir()}))
    assert found[0] == found[1]
    lines = found[0][1]["osworld_replay_train.jsonl"].splitlines()
    assert len({(row["task_id"], row["original_task_id"]) for row in map(json.loads, lines)}) == len(lines) > 100


def is_tracker(pid: int) -> bool:
    """Whether this is Python's own helper for spawned processes."""
    return b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()


def test_a_worker_that_is_killed_is_one_clear_error_and_the_others_end(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(record()) + "\n")
    origin = Origin(source="a", path="a.jsonl", folder=tmp_path, quality_rank=0)
    workers: list[int] = []
    others = set(children_of(os.getpid()))
    """What tests before this one left in the process that they share."""

    def decide(job: Job, reading: Reading) -> tuple[list[int], int]:
        workers.extend(pid for pid in children_of(os.getpid()) if pid not in others and not is_tracker(pid))
        os.kill(workers[0], signal.SIGKILL)
        return [0], 0

    jobs = [(Block(path=path, num_bytes=path.stat().st_size), origin)] * 50
    with pytest.raises(DatasetError, match=r"worker process \d+ of the union build was killed by signal 9"):
        list(read_blocks_in_order(jobs, SETUP, decide, num_workers=2))
    assert len(workers) >= 2
    assert not any(is_alive(pid) for pid in workers)


def test_large_blocks_are_read_one_at_a_time_and_in_order(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n" * 100)
    origin = Origin(source="a", path="a.jsonl", folder=tmp_path, quality_rank=0)
    jobs = [(Block(path=path, offset=1, num_bytes=size), origin) for size in (10, 10, 2**30, 10, 2**30, 10)]
    order: list[int] = []

    def decide(job: Job, reading: Reading) -> tuple[list[int], int]:
        order.append(job[0].num_bytes)
        return [], 0

    assert [job[0].num_bytes for job, _ in read_blocks_in_order(jobs, SETUP, decide, num_workers=2)] == order
    assert order == [10, 10, 2**30, 10, 2**30, 10]


_BUILD = """
import sys
from pathlib import Path
from osworld_pipeline.datasets.artefacts import write_union_artefacts
root = Path(sys.argv[1])
print("go", flush=True)
write_union_artefacts(root / "datasets", root / "osworld", root / "out", system_prompt="new", num_workers=2)
"""


@pytest.mark.slow
@pytest.mark.parametrize("delay_s", [0.0, 0.3, 0.8])
def test_a_build_that_is_killed_leaves_whole_artefacts_and_no_process(tmp_path: Path, delay_s: float) -> None:
    state = StateDir(tmp_path)
    fill(state, num_records=60, padding=200_000)
    write_union_artefacts(state.datasets, state.osworld_repo, tmp_path / "out", system_prompt="old", num_workers=0)
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    with subprocess.Popen([sys.executable, "-c", _BUILD, str(tmp_path)], stdout=subprocess.PIPE) as build:
        assert build.stdout is not None
        build.stdout.readline()
        wait_until(lambda: len(children_of(build.pid)) == 2)
        workers = children_of(build.pid)
        time.sleep(delay_s)
        build.kill()
    wait_until(lambda: not any(is_alive(pid) for pid in workers))
    kept = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir() if not path.name.startswith(".")}
    write_union_artefacts(state.datasets, state.osworld_repo, tmp_path / "out", system_prompt="new", num_workers=0)
    after = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert sorted(after) == sorted(before)
    assert after["osworld_replay_train.jsonl"] != before["osworld_replay_train.jsonl"]
    # A fast machine may finish before a late kill.
    assert kept == before or (delay_s and kept == after)


def test_a_full_disk_is_one_clear_error_and_leaves_nothing(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    fill(state, num_records=30)
    program = (
        "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
        "from osworld_pipeline.errors import StoreError\n"
        f"try:\n exec({_BUILD!r})\nexcept StoreError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert "cannot write" in done.stdout
    assert "no partial file remains" in done.stdout
    assert done.stderr == ""
    assert list((tmp_path / "out").iterdir()) == []


def test_a_worker_for_artefacts_imports_nothing_heavy() -> None:
    program = (
        "import sys; import osworld_pipeline.datasets.union.worker; "
        "print([name for name in ('pyarrow', 'numpy', 'PIL', 'pydantic', 'rich', 'duckdb') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
