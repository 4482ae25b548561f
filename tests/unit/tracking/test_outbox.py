"""Events sent to a tracking server that works, dies, hangs and comes back."""

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from osworld_pipeline.tracking.outbox import Outbox, TrackingEvent


class Server:
    """A server that accepts events while it is up."""

    def __init__(self, *, is_up: bool = True) -> None:
        self.is_up = is_up
        self.taken: list[int] = []
        self.tries = 0

    def __call__(self, event: TrackingEvent) -> None:
        self.tries += 1
        if not self.is_up:
            raise ConnectionError("connection refused")
        self.taken.append(event["number"])


class RefusedError(Exception):
    def get_http_status_code(self) -> int:
        return 400


def event(number: int, kind: str = "metrics") -> dict[str, Any]:
    return {"kind": kind, "number": number}


def wait_for(condition: Callable[[], bool], *, limit_s: float = 10.0) -> None:
    until = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < until, "it did not come to pass"
        time.sleep(0.005)


def test_events_arrive_in_order_and_are_all_there_at_the_end() -> None:
    server, said = Server(), []
    outbox = Outbox(server, name="run", say=said.append)
    for number in range(50):
        outbox.post(event(number))
    assert outbox.close() == 0
    assert server.taken == list(range(50))
    assert said == []


def test_a_server_that_dies_and_comes_back_gets_every_event_and_its_death_is_reported_once() -> None:
    server, said = Server(is_up=False), []
    outbox = Outbox(server, name="run", say=said.append, retry_s=0.01)
    for number in range(5):
        outbox.post(event(number))
    wait_for(lambda: server.tries >= 3)
    server.is_up = True
    wait_for(lambda: len(server.taken) == 5)
    assert outbox.close() == 0
    assert server.taken == list(range(5))
    assert [text.split(":")[0].split(" (")[0] for text in said] == ["MLflow does not answer", "MLflow responds again"]


def test_events_that_a_dead_server_did_not_get_are_kept_and_sent_by_a_later_outbox(tmp_path: Path) -> None:
    dead, said = Server(is_up=False), []
    outbox = Outbox(dead, name="first", say=said.append, folder=tmp_path)
    outbox.post(event(0))
    outbox.post(event(1))
    wait_for(lambda: dead.tries >= 1)
    started = time.monotonic()
    assert outbox.close() == 2
    assert time.monotonic() - started < 10, "a server known to be dead is not waited for"
    assert [json.loads(line)["number"] for line in (tmp_path / "first.jsonl").read_text().splitlines()] == [0, 1]
    assert "2 events for MLflow could not be sent" in said[-1]

    server = Server()
    later = Outbox(server, name="second", say=said.append, folder=tmp_path)
    later.post(event(2))
    assert later.close() == 0
    assert sorted(server.taken) == [0, 1, 2]
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_hangs_does_not_delay_closing() -> None:
    released = threading.Event()

    def hang(_: TrackingEvent) -> None:
        released.wait(10)

    said: list[str] = []
    outbox = Outbox(hang, name="run", say=said.append)
    outbox.post(event(0))
    started = time.monotonic()
    assert outbox.close(timeout_s=0.1) == 1
    assert time.monotonic() - started < 5.0
    assert said == ["1 events for MLflow could not be sent and are lost"]
    released.set()


def test_an_event_that_is_permanently_refused_does_not_delay_the_others() -> None:
    taken: list[int] = []

    def refuse_the_first(one: TrackingEvent) -> None:
        if one["number"] == 0:
            raise RefusedError("bad name of a metric")
        taken.append(one["number"])

    said: list[str] = []
    outbox = Outbox(refuse_the_first, name="run", say=said.append)
    outbox.post(event(0))
    outbox.post(event(1))
    assert outbox.close() == 0
    assert taken == [1]
    assert said == ["MLflow rejected the event metrics: bad name of a metric; it is dropped"]


def test_above_the_limit_only_the_oldest_metrics_are_dropped() -> None:
    server, said = Server(is_up=False), []
    outbox = Outbox(server, name="run", say=said.append, max_events=4, retry_s=0.01)
    outbox.post(event(0))
    outbox.post(event(1, "checkpoint"))
    for number in range(2, 8):
        outbox.post(event(number))
    server.is_up = True
    wait_for(lambda: len(server.taken) == 4)
    outbox.close()
    assert server.taken == [0, 1, 6, 7]
    assert sum("oldest metrics are dropped" in text for text in said) == 1
