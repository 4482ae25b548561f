"""The outbox for a stage's MLflow events: a thread sends them in order, so that a slow, dead or hanging server neither
delays nor ends a training run. Unsent events are kept, written to a file at the end, and sent by a later stage."""

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from osworld_pipeline.atomic_io import remove_stale_temps, write_file
from osworld_pipeline.errors import StoreError
from osworld_pipeline.tracking.client import first_words, is_final

TrackingEvent = Mapping[str, Any]
"""JSON; `kind` is the type of the event."""
Deliver = Callable[[TrackingEvent], None]
MAX_LETTERS = 10_000
"""Maximum of kept events; beyond it the oldest metrics are dropped."""
RETRY_S = 5.0
CLOSE_S = 30.0
"""Maximum wait at the end of a stage for a responding server."""
FAILING_CLOSE_S = 1.0
"""The same for a server that did not respond."""


class Outbox:
    """Sends events in order from one thread, which also reads and removes the files of earlier outboxes. Everything
    else happens in the caller's thread."""

    def __init__(
        self,
        deliver: Deliver,
        *,
        name: str,
        say: Callable[[str], None],
        folder: Path | None = None,
        max_events: int = MAX_LETTERS,
        retry_s: float = RETRY_S,
    ) -> None:
        """`name`: of this outbox's file. `folder`: for unsent events, also those of earlier outboxes; None: not kept.
        `say`: called from the thread that posts or closes, not from the outbox's thread."""
        self._deliver = deliver
        self._say = say
        self._folder = folder
        self._name = name
        self._max_events = max_events
        self._retry_s = retry_s
        self._events: deque[TrackingEvent] = deque()
        self._notices: deque[str] = deque()
        self._changed = threading.Condition()
        self._is_closing = self._is_abandoned = self._is_failing = False
        self._num_sent = self._num_dropped = 0
        self._backlog = sorted(folder.glob("*.jsonl")) if folder else []
        self._thread = threading.Thread(target=self._work, name="mlflow outbox", daemon=True)
        self._thread.start()

    def post(self, event: TrackingEvent) -> None:
        with self._changed:
            if len(self._events) >= self._max_events:
                self._drop_oldest()
            self._events.append(event)
            self._changed.notify_all()
        self._pass_notices_on()

    def close(self, *, timeout_s: float = CLOSE_S) -> int:
        """Sends the remaining events, or writes them to a file; returns how many were not sent. Does not raise."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(min(timeout_s, FAILING_CLOSE_S) if self._is_failing else timeout_s)
        with self._changed:
            self._is_abandoned = True
            rest = list(self._events)
        if rest:
            self._notices.append(self._keep(rest))
        self._pass_notices_on()
        return len(rest)

    def _keep(self, rest: list[TrackingEvent]) -> str:
        if self._folder is None:
            return f"{len(rest)} events for MLflow could not be sent and are lost"
        path = self._folder / f"{self._name}.jsonl"
        try:
            remove_stale_temps(self._folder)
            write_file(path, "".join(f"{json.dumps(event)}\n" for event in rest).encode())
        except StoreError as error:
            return f"{len(rest)} events for MLflow could neither be sent nor kept: {error}"
        return f"{len(rest)} events for MLflow could not be sent; they are kept in {path} and sent with a later stage"

    def _pass_notices_on(self) -> None:
        while self._notices:
            self._say(self._notices.popleft())

    def _drop_oldest(self) -> None:
        # The first may be in flight; of the others, only metrics are expendable.
        index = next((i for i, event in enumerate(self._events) if i and event["kind"] == "metrics"), None)
        if index is None:
            index = len(self._events) - 1
        del self._events[index]
        self._num_dropped += 1
        if self._num_dropped == 1:
            self._notices.append(f"more than {self._max_events:,} events wait for MLflow: oldest metrics are dropped")

    def _work(self) -> None:
        while True:
            with self._changed:
                while not (self._events or self._backlog or self._is_closing):
                    self._changed.wait()
                if self._is_closing and self._is_failing:
                    return
                event = self._events[0] if self._events else None
            if event is not None:
                is_sent = self._try(event)
            elif self._backlog:
                is_sent = self._send_backlog(self._backlog[0])
            else:
                return
            with self._changed:
                if self._is_abandoned:
                    return
                if is_sent and event is not None:
                    self._events.popleft()
                elif is_sent:
                    self._backlog.pop(0)
                elif self._is_closing:
                    return
                else:
                    self._wait_to_retry()

    def _wait_to_retry(self) -> None:
        until = time.monotonic() + self._retry_s
        while not self._is_closing and (left := until - time.monotonic()) > 0:
            self._changed.wait(left)

    def _try(self, event: TrackingEvent) -> bool:
        """Whether the event is done: sent, or finally refused."""
        try:
            self._deliver(event)
        except Exception as error:  # noqa: BLE001 - no tracking error may end a training
            if is_final(error):
                self._notices.append(f"MLflow rejected the event {event['kind']}: {first_words(error)}; it is dropped")
                return True
            if not self._is_failing:
                self._notices.append(
                    f"MLflow does not answer ({first_words(error)}): the stage continues; "
                    "events are kept and sent later"
                )
            self._is_failing = True
            return False
        self._num_sent += 1
        if self._is_failing:
            self._notices.append("MLflow responds again: kept events are being sent")
        self._is_failing = False
        return True

    def _send_backlog(self, path: Path) -> bool:
        """Sends the events of an earlier outbox; delivery is idempotent."""
        try:
            events = [json.loads(line) for line in path.read_text().splitlines()]
        except FileNotFoundError:
            return True  # already sent by another stage
        except (OSError, ValueError) as error:
            self._notices.append(f"{path} cannot be read ({error}): remove it")
            return True
        if all(self._try(event) for event in events):
            path.unlink(missing_ok=True)
            return True
        return False
