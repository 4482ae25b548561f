"""Before schema version 10 the token lists were columns of `episodes`: one list for all sequences of an episode, and
their lengths. Readers refuse such heads (`need_sequences`). A migration writes the files of `sequences` that they lack
(`add_sequences`), and then rewrites the heads without the old columns."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from osworld_pipeline.atomic_io import write_parquet
from osworld_pipeline.columns import BOOKKEEPING, OLDEST_READ, Row, marked, schema_version, stored
from osworld_pipeline.domain.shown_commands import pipeline_line
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import StoreError
from osworld_pipeline.progress import OnProgress, tracked
from osworld_pipeline.store.format_note import FORMAT, read_format
from osworld_pipeline.store.part_files import COMPACTED, INCOMING, SEED, list_names

_TOKENS = ("token_ids", "response_mask", "sampled_logprobs", "policy_versions")
OLD_COLUMNS: Mapping[str, frozenset[str]] = {
    "episodes": frozenset({*_TOKENS, "image_steps", "sequence_lengths", "sequence_image_counts"})
}
"""Columns that are not read any more, by table."""
_READ = ("episode_id", *sorted(OLD_COLUMNS["episodes"]), *BOOKKEEPING.names)
_BATCH_ROWS = 64


def need_sequences(root: Path) -> None:
    """
    Raises:
        StoreError: an older program wrote heads without files of sequences; names the migration. Or the state has a
            newer format.
    """
    if read_format(root).format == FORMAT:
        return
    heads = old_heads(root)
    if heads:
        raise StoreError(
            f"{len(heads)} files in {root / 'episodes'} are of a schema version below {OLDEST_READ}, with token lists "
            f"that this version does not read: run {pipeline_line(StateDir(root.parent), 'migrate')} "
            "(--dry-run shows what it changes)"
        )


def old_heads(root: Path) -> list[str]:
    """The heads of an older version that have no file of sequences, below their table's folder. Raises StoreError."""
    return [name for name in _lacking(root) if _is_old(root / "episodes" / name)]


def _is_old(head: Path) -> bool:
    """False also if it was compacted and removed."""
    try:
        version = schema_version(pq.read_metadata(head).metadata)
    except FileNotFoundError:
        return False
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise _damaged(head, error) from error
    return version is not None and version < OLDEST_READ


def _damaged(head: Path, error: Exception) -> StoreError:
    return StoreError(f"{head} is damaged ({error}): remove it and run its stage again")


def add_sequences(root: Path, on_progress: OnProgress | None = None) -> int:
    """Writes the missing files of `sequences` for heads of an older version; returns their number. Safe with concurrent
    calls, which write the same rows.

    Raises:
        StoreError: a head is damaged, its tokens cannot be split, or the file system refused.
    """
    num_written = 0
    for name in tracked(_lacking(root), on_progress, "moving token lists", "files"):
        sequences = _old_sequences(root / "episodes" / name)
        if sequences is not None:
            path = root / "sequences" / name
            write_parquet(path, marked(sequences), temp_folder=root / INCOMING, statistics=("episode_id",))
            num_written += 1
    return num_written


def _lacking(root: Path) -> list[str]:
    """The heads without a file of sequences, below their table's folder. Heads are listed first: their details are
    written before them."""
    lacking: list[str] = []
    for folder in ("", f"{COMPACTED}/"):
        heads = list_names(root / "episodes" / folder)
        lacking += [f"{folder}{name}" for name in set(heads) - {SEED, *list_names(root / "sequences" / folder)}]
    return sorted(lacking)


def _old_sequences(head: Path) -> pa.Table | None:
    """The rows of `sequences` in a head; None if its version has none, or it was compacted and removed."""
    try:
        with pq.ParquetFile(head) as file:
            version = schema_version(file.metadata.metadata)
            if version is None or version >= OLDEST_READ:
                return None
            columns = [name for name in _READ if name in file.schema_arrow.names]
            schema = stored("sequences")
            # A few rows at a time: as Python objects, token lists take ten times their memory.
            batches = file.iter_batches(_BATCH_ROWS, columns=columns)
            rows = ([part for row in batch.to_pylist() for part in _split(row)] for batch in batches)
            return pa.concat_tables(
                [schema.empty_table(), *(pa.Table.from_pylist(some, schema=schema) for some in rows)]
            )
    except FileNotFoundError:
        return None
    except (pa.ArrowException, OSError, ValueError, TypeError, KeyError, OverflowError) as error:
        raise _damaged(head, error) from error


def _split(row: Mapping[str, Any]) -> Iterator[Row]:
    """The sequences of an episode. Raises StoreError if the tokens lack lengths, ValueError if these do not fit."""
    lengths, counts = row.get("sequence_lengths"), row.get("sequence_image_counts")
    if lengths is None and row.get("token_ids"):
        raise StoreError(
            f"episode {row['episode_id']} has tokens without the lengths of its sequences: a version before any "
            "release wrote it, and this one cannot read its tokens; remove its part and run its stage again"
        )
    for num_values, values in ((lengths, "token_ids"), (counts, "image_steps")):
        if sum(num_values or ()) != len(row.get(values) or ()):
            raise ValueError(f"the lengths of episode {row['episode_id']} do not fit its {values}")
    kept = {name: row[name] for name in ("episode_id", *BOOKKEEPING.names) if name in row}
    start = first_image = 0
    for number, (length, count) in enumerate(zip(lengths or (), counts or (), strict=True)):
        end, last_image = start + length, first_image + count
        tokens = {name: row[name][start:end] for name in _TOKENS}
        images = row["image_steps"][first_image:last_image]
        yield kept | {"sequence_index": number, **tokens, "image_steps": images}
        start, first_image = end, last_image
