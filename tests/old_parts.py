"""Parts as schema version 9 wrote them, with the token lists as columns of episodes."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from osworld_pipeline.atomic_io import write_file, write_parquet
from osworld_pipeline.columns import SCHEMA_KEY, SEQUENCES
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.store.format_note import NOTE
from osworld_pipeline.store.old_tokens import OLD_COLUMNS
from osworld_pipeline.store.part_files import SEED


def files_of(state: StateDir, table: str) -> list[Path]:
    return sorted(path for path in (state.trajectories / table).rglob("*.parquet") if path.name != SEED)


def make_old(state: StateDir) -> None:
    """Rewrites all parts of episodes, and the note of their format."""
    root = state.trajectories
    for head in files_of(state, "episodes"):
        details = root / "sequences" / head.relative_to(root / "episodes")
        sequences = pq.read_table(details).to_pylist()
        table = pq.read_table(head)
        lists: dict[str, list] = {name: [] for name in sorted(OLD_COLUMNS["episodes"])}
        for episode_id in table["episode_id"].to_pylist():
            own = [one for one in sequences if one["episode_id"] == episode_id]
            for name in lists.keys() & set(SEQUENCES.names):
                lists[name].append([value for one in own for value in one[name]])
            lists["sequence_lengths"].append([len(one["token_ids"]) for one in own])
            lists["sequence_image_counts"].append([len(one["image_steps"]) for one in own])
        for name, values in lists.items():
            kind = SEQUENCES.field(name).type if name in SEQUENCES.names else pa.list_(pa.int32())
            table = table.append_column(name, pa.array(values, kind))
        write_parquet(head, table.replace_schema_metadata({SCHEMA_KEY: b"9"}))
        details.unlink()
    write_file(root / NOTE, b'{"format": 1}\n')
