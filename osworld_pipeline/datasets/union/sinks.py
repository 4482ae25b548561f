"""Sinks that write rows as they arrive: Parquet in row groups, so that memory holds a few blocks, not a whole table."""

from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from osworld_pipeline.columns import REJECTS, REPLAY_BUFFER
from osworld_pipeline.datasets.rejects import Reject

FLUSH_ROWS = 5_000
GROUP_ROWS = 1_024
GROUP_BYTES = 32 * 2**20
"""A row group of the replay table is written when it has this many rows, or this many bytes in memory."""


class PayloadSink(Protocol):
    """Accepts the output of a Form, in the order of the sources."""

    def add(self, payload: bytes) -> None: ...

    def close(self) -> None: ...

    def abandon(self) -> None:
        """Closes the file after a failure; ignores errors."""
        ...


class LineSink:
    """Lines of JSON, as they are."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def add(self, payload: bytes) -> None:
        self._file.write(payload)

    def close(self) -> None:
        self._file.flush()

    def abandon(self) -> None:
        pass


class RowSink:
    """Arrow streams of replay rows."""

    def __init__(self, file: IO[bytes]) -> None:
        self._writer = pq.ParquetWriter(file, REPLAY_BUFFER, compression="zstd")
        self._batches: list[pa.RecordBatch] = []

    def add(self, payload: bytes) -> None:
        with pa.ipc.open_stream(payload) as stream:
            self._batches += list(stream)
        num_rows = sum(batch.num_rows for batch in self._batches)
        if num_rows >= GROUP_ROWS or sum(batch.nbytes for batch in self._batches) >= GROUP_BYTES:
            self._flush()

    def close(self) -> None:
        self._flush()
        self._writer.close()

    def abandon(self) -> None:
        with suppress(OSError, ValueError):
            self._writer.close()

    def _flush(self) -> None:
        if self._batches:
            table = pa.Table.from_batches(self._batches, schema=REPLAY_BUFFER)
            self._writer.write_table(table, row_group_size=max(table.num_rows, 1))
            self._batches.clear()


@dataclass
class RejectWriter:
    """Writes rejects into an open Parquet file in row groups, and counts them."""

    file: IO[bytes]
    by_kind: Counter[str] = field(default_factory=Counter)
    by_source: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._writer = pq.ParquetWriter(self.file, REJECTS, compression="zstd")
        self._rows: list[dict[str, Any]] = []

    def add(self, rejects: Iterable[Reject]) -> None:
        for reject in rejects:
            self.by_kind[reject.kind] += 1
            self.by_source[reject.source] += 1
            self._rows.append(_row(reject))
        if len(self._rows) >= FLUSH_ROWS:
            self._flush()

    def close(self) -> None:
        self._flush()
        self._writer.close()

    def abandon(self) -> None:
        with suppress(OSError, ValueError):
            self._writer.close()

    def _flush(self) -> None:
        if self._rows:
            self._writer.write_table(pa.Table.from_pylist(self._rows, schema=REJECTS))
            self._rows.clear()


def _row(reject: Reject) -> dict[str, Any]:
    return {
        "source_dataset": reject.source,
        "source_path": reject.path,
        "source_line": reject.line_no,
        "kind": reject.kind,
        # A reason may contain a lone surrogate, which Arrow cannot store.
        "reason": reject.reason.encode(errors="backslashreplace").decode(),
        "task_id": reject.task_id.encode(errors="backslashreplace").decode() or None,
    }
