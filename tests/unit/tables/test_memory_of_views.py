"""Opening the views, querying them and writing a report take little memory, even if the messages are long."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
from episode_samples import make_episode
from replay_samples import make_row

from osworld_pipeline.atomic_io import write_parquet
from osworld_pipeline.columns import OWNED_TABLES
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.store import TrajectoryStore
from osworld_pipeline.tables.builds import new_build

NUM_ROWS, ROW_BYTES = 200, 2**20
MAX_MB = NUM_ROWS * ROW_BYTES / 2**20
"""Size of the messages; a copy of them takes several times as much."""
PEAKS = """
import json, sys
from pathlib import Path
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.web.reports.report import write_report
from osworld_pipeline.tables.catalog import fresh_views
def peak_mb():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM:")) / 1024
state, peaks = StateDir(Path(sys.argv[1])), [peak_mb()]
with fresh_views(state) as views:
    peaks.append(peak_mb())
    views.execute("SELECT source_dataset, count(*), avg(reward) FROM replay_buffer GROUP BY ALL").fetchall()
    views.execute("SELECT count(*) FROM lineage").fetchall()
    peaks.append(peak_mb())
write_report(state)
print(json.dumps([*peaks, peak_mb()]))
"""


def test_long_messages_are_not_loaded_where_they_are_not_shown(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    texts = [os.urandom(ROW_BYTES // 2).hex() for _ in range(NUM_ROWS)]
    turns = [[{"role": "user", "content": [{"type": "text", "text": text}]}] for text in texts]
    rows = [make_row(f"r{number}", messages=messages) for number, messages in enumerate(turns)]
    with new_build(state) as folder:
        table = pa.Table.from_pylist(rows, schema=OWNED_TABLES["replay_buffer"])
        write_parquet(folder / "replay_buffer.parquet", table)
    TrajectoryStore(state).write_episodes("eval", [make_episode("e1")])
    done = subprocess.run(
        [sys.executable, "-c", PEAKS, str(state.root)], capture_output=True, text=True, timeout=120, check=True
    )
    start, *peaks = json.loads(done.stdout)
    assert max(peaks) - start < MAX_MB, (start, peaks)
