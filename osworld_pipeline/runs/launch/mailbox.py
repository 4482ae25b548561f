"""A folder through which a launcher and a program on another machine communicate: the launcher writes the job, the
program writes messages, and each side detects whether the other is alive.

The folder is in the state folder, which all machines of a run share. A job may hold secrets: only this user can read
its file, and the program removes it after reading.
"""

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import StoreError
from osworld_pipeline.file_locks import TakenError, lock, remove_lock
from osworld_pipeline.runs.messages import Message, parse_message

SEGMENT_BYTES = 256 << 10
"""Messages go to numbered files of about this size; the reader removes files that it has read, so the folder stays
small."""
WATCH_EVERY_S = 1.0


@dataclass(frozen=True)
class Mailbox:
    folder: Path

    @property
    def name(self) -> str:
        return self.folder.name

    def put_job(self, job: Mapping[str, Any]) -> None:
        """Raises StoreError."""
        with _writing(self.folder):
            descriptor = os.open(self._job, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as file:
                json.dump(job, file)

    def take_job(self) -> dict[str, Any]:
        """Reads and removes the job, which then exists only in the caller's memory.

        Raises:
            StoreError: there is no job: another start of the same program took it, its launcher has ended, or the state
                folder is not shared.
        """
        try:
            job = json.loads(self._job.read_text())
            self._job.unlink()
        except FileNotFoundError as error:
            raise StoreError(
                f"there is no job in {self.folder}: its launcher has ended, another start of the job has taken it, or "
                "the state folder is not shared with this machine"
            ) from error
        return job

    def beat(self) -> None:
        """Sends a heartbeat of the launcher. The reader only checks whether the value has changed, because clocks of
        machines differ. Raises StoreError."""
        with _writing(self.folder):
            (self.folder / "alive").write_text(str(time.monotonic_ns()))

    def ask_to_stop(self) -> None:
        """Raises StoreError."""
        with _writing(self.folder):
            (self.folder / "stop").touch()

    @property
    def is_asked_to_stop(self) -> bool:
        return (self.folder / "stop").exists()

    def read_beat(self) -> str:
        with suppress(OSError):
            return (self.folder / "alive").read_text()
        return ""

    def segment(self, number: int) -> Path:
        return self.folder / f"messages-{number:06d}.jsonl"

    def segments(self) -> list[int]:
        return sorted(int(path.stem.removeprefix("messages-")) for path in self.folder.glob("messages-*.jsonl"))

    @property
    def _job(self) -> Path:
        return self.folder / "job.json"


def mailbox_folder(state: StateDir, name: str) -> Path:
    return state.launches / name


@contextmanager
def open_mailbox(state: StateDir, name: str) -> Iterator[Mailbox]:
    """A new mailbox that exists until the block ends; its lock marks it as in use."""
    folder = mailbox_folder(state, name)
    with _writing(folder):
        held = lock(_lock_of(folder))  # no process sees the folder unlocked and treats it as an orphan
        folder.mkdir(mode=0o700)
    try:
        yield Mailbox(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        held.release(remove=True)


def orphaned_mailboxes(state: StateDir) -> list[Mailbox]:
    """Mailboxes whose launcher is dead."""
    found: list[Mailbox] = []
    for path in sorted(state.launches.glob("[!.]*/")):
        if path.suffix == ".rw":
            continue  # a lock
        with suppress(OSError, TakenError):
            lock(_lock_of(path)).release(remove=True)
            found.append(Mailbox(path))
    return found


def _lock_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.lock")


def remove_orphan(folder: Path) -> None:
    """Removes a mailbox whose launcher is dead, with its lock."""
    shutil.rmtree(folder, ignore_errors=True)
    remove_lock(_lock_of(folder))


class MessageWriter:
    """Used by the program, from any thread. A restarted writer starts a new file."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._lock = threading.Lock()
        self._number = max(mailbox.segments(), default=0) + 1

    def report(self, message: Message) -> None:
        """Raises StoreError if the folder cannot be written."""
        line = message.to_line() + "\n"
        with self._lock:
            with _writing(self._mailbox.folder), self._mailbox.segment(self._number).open("a") as file:
                file.write(line)
                is_full = file.tell() >= SEGMENT_BYTES
            self._number += is_full


@dataclass(kw_only=True)
class MessageReader:
    """Used by the launcher. Removes files that it has read completely."""

    mailbox: Mailbox
    _number: int = 0
    _offset: int = 0
    _rest: bytes = field(default=b"", repr=False)

    def read(self) -> list[Message]:
        """The messages since the last call, in order; an incomplete line of a killed writer is dropped. Raises
        PipelineError if one is not valid."""
        messages: list[Message] = []
        for number in [number for number in self.mailbox.segments() if number >= self._number]:
            if number > self._number:
                # The writer of the previous segment has started the next one or is dead: the segment is complete.
                messages += self._read_on()
                self.mailbox.segment(self._number).unlink(missing_ok=True)
                self._number, self._offset, self._rest = number, 0, b""
            messages += self._read_on()
        return messages

    def _read_on(self) -> list[Message]:
        try:
            with self.mailbox.segment(self._number).open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [parse_message(json.loads(line)) for line in lines if line]


@contextmanager
def watched_launcher(
    mailbox: Mailbox, *, lost_after_s: float, on_stop: Callable[[], None], on_lost: Callable[[], None]
) -> Iterator[None]:
    """Calls `on_stop` once when the launcher requests a stop, and `on_lost` once when it has sent no heartbeat for
    `lost_after_s`. Both run in a separate thread."""
    is_over = threading.Event()

    def watch() -> None:
        last, since, is_stopped = mailbox.read_beat(), time.monotonic(), False
        while not is_over.wait(WATCH_EVERY_S):
            if not is_stopped and mailbox.is_asked_to_stop:
                is_stopped = True
                on_stop()
            beat = mailbox.read_beat()
            if beat != last and beat:
                last, since = beat, time.monotonic()
            elif time.monotonic() - since > lost_after_s:
                on_lost()
                return

    thread = threading.Thread(target=watch, name="launcher-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(WATCH_EVERY_S + 1)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"the mailbox {folder} cannot be written ({error.strerror or error}): check that the state folder has "
            "space and is writable on every machine of the run"
        ) from error
