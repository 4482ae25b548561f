"""Many processes on one store: appends, parts written again, compaction, collection, a reader; and kills at any moment.

OSWORLD_STORE_SECONDS makes the storm longer (60 for the published figures)."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from episode_samples import make_episode

from benchmarks.store_storm import QUESTION, run_storm
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.runs.upkeep.upkeep import collect_garbage, compact_store
from osworld_pipeline.store import TrajectoryStore
from osworld_pipeline.tables.catalog import rebuild_catalog
from osworld_pipeline.tables.query import run_query

SECONDS = float(os.environ.get("OSWORLD_STORE_SECONDS", "6"))
ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(SECONDS * 3 + 240)
def test_writers_compaction_and_collection_lose_or_duplicate_no_row_and_fail_no_read(tmp_path: Path) -> None:
    storm = run_storm(tmp_path, seconds=SECONDS, num_writers=4 if SECONDS < 30 else 10, compact_every_s=0.5)
    assert storm.failures == []
    assert storm.upkeep_failures == []
    assert storm.num_reads > 3
    assert storm.num_compactions > 1
    assert storm.num_appends > storm.num_parts


UPKEEP_FOR_EVER = """
import sys
from pathlib import Path
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import StoreError
from osworld_pipeline.runs.upkeep.upkeep import collect_garbage, compact_store
state = StateDir(Path(sys.argv[1]))
print("ready", flush=True)
while True:
    compact_store(state, min_parts=1, target_bytes=60_000, retired_grace_s=0.1)
    collect_garbage(state, grace_s=60, retired_grace_s=0.1)
"""


@pytest.mark.slow
def test_upkeep_killed_at_any_moment_leaves_the_store_intact(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    rebuild_catalog(state)
    store = TrajectoryStore(state)
    image = store.write_blob(b"used", suffix="png")
    num_parts = 0
    for round_ in range(4):
        command = [sys.executable, "-c", UPKEEP_FOR_EVER, str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            for _ in range(3 + round_):
                store.write_episodes(f"p{num_parts}", [make_episode(f"p{num_parts}-e{index}") for index in range(2)])
                num_parts += 1
            store.write_episodes("again", [make_episode("again", num_steps=round_ + 1)])
            time.sleep(0.043 * round_)
            os.kill(child.pid, signal.SIGKILL)
        assert run_query(state, QUESTION).rows == [(2 * num_parts + 1, 2 * num_parts + 1, 0)]
        assert store.read_episodes("again") == (make_episode("again", num_steps=round_ + 1),)
    compact_store(state, min_parts=1, retired_grace_s=0)
    store.write_episodes("img", [make_episode("img", num_steps=0)])
    collect_garbage(state, grace_s=-1, retired_grace_s=0)
    assert run_query(state, QUESTION).rows == [(2 * num_parts + 2, 2 * num_parts + 2, 0)]
    left = [path.name for path in state.trajectories.rglob("*") if path.name.endswith(".tmp")]
    assert left == []
    assert image not in [sha256 for sha256, _, _ in store.blobs.list()]
