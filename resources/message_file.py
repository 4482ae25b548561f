"""The file through which a program sends messages to its launcher, one JSON line per message."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import dagster as dg
from dagster_pipes import PipesDefaultMessageWriter, PipesParams


class MessageFile(dg.PipesMessageReader):
    """Read by the process that waits for the program, one complete line at a time. Dagster's own reader also reads
    incomplete lines: if the kernel shows only half of a write, it loses that message and all later ones."""

    def __init__(self) -> None:
        self._opened: tuple[Path, dg.PipesMessageHandler] | None = None
        self._num_read = 0
        """Bytes of the complete lines read so far."""

    @contextmanager
    def read_messages(self, handler: dg.PipesMessageHandler) -> Iterator[PipesParams]:
        with tempfile.TemporaryDirectory(prefix="messages-") as folder:
            path = Path(folder, "messages")
            path.touch()
            self._opened = path, handler
            try:
                yield {
                    PipesDefaultMessageWriter.FILE_PATH_KEY: str(path),
                    PipesDefaultMessageWriter.INCLUDE_STDIO_IN_MESSAGES_KEY: False,
                }
            finally:
                self.read_new()

    def read_new(self) -> None:
        """Forwards the messages since the last call. After the program's end all messages have been forwarded, except a
        line that a kill cut off."""
        assert self._opened is not None, "the session is not open"
        path, handler = self._opened
        with path.open("rb") as file:
            file.seek(self._num_read)
            lines = file.read().splitlines(keepends=True)
        for line in lines:
            if not line.endswith(b"\n"):
                return
            self._num_read += len(line)
            handler.handle_message(json.loads(line))

    def no_messages_debug_text(self) -> str:
        return "Attempted to read messages from a temporary file."
