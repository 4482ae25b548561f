"""Episodes that end while others are written share the next write."""

import asyncio
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from episode_samples import make_episode

from osworld_pipeline.domain.episode import Episode
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import StoreError
from osworld_pipeline.runs.rollouts import episode_writer
from osworld_pipeline.runs.rollouts.episode_writer import EpisodeWriter
from osworld_pipeline.store import TrajectoryStore


class SlowStore(TrajectoryStore):
    """Each write waits for `go_on`; the next write of a name in `bad` fails."""

    def __init__(self, state: StateDir) -> None:
        super().__init__(state)
        self.go_on, self.bad = threading.Semaphore(0), ""
        self.written: list[list[str]] = []

    def write_new_parts(self, parts: Mapping[str, Sequence[Episode]]) -> None:
        assert self.go_on.acquire(timeout=10)
        if self.bad in parts:
            raise StoreError("no disk space left")
        super().write_new_parts(parts)
        self.written.append(list(parts))


@pytest.fixture
def store(tmp_path: Path) -> SlowStore:
    return SlowStore(StateDir(tmp_path))


def started(writer: EpisodeWriter, *names: str) -> list[asyncio.Task[None]]:
    return [asyncio.create_task(writer.write(make_episode(name))) for name in names]


async def until_writing() -> None:
    await asyncio.sleep(0.05)


async def test_episodes_that_end_during_a_write_are_written_together_and_are_stored_on_return(store: SlowStore) -> None:
    writer = EpisodeWriter(store)
    first = started(writer, "e0")
    await until_writing()
    others = started(writer, "e1", "e2", "e3")
    await until_writing()
    store.go_on.release()
    await asyncio.gather(*first)
    assert store.existing_parts() == ["e0"]
    assert not any(task.done() for task in others)
    store.go_on.release()
    await asyncio.gather(*others)
    assert store.written == [["e0"], ["e1", "e2", "e3"]]
    assert store.existing_parts() == ["e0", "e1", "e2", "e3"]


async def test_a_write_has_at_most_the_maximum_number_of_episodes(
    store: SlowStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(episode_writer, "MAX_EPISODES", 2)
    store.go_on.release(3)
    await asyncio.gather(*started(EpisodeWriter(store), "e0", "e1", "e2", "e3", "e4"))
    assert store.written == [["e0", "e1"], ["e2", "e3"], ["e4"]]


async def test_an_error_reaches_each_episode_of_the_write_and_no_other(store: SlowStore) -> None:
    writer, store.bad = EpisodeWriter(store), "e1"
    store.go_on.release(2)
    failed = await asyncio.gather(*started(writer, "e0", "e1"), return_exceptions=True)
    assert [str(error) for error in failed] == ["no disk space left"] * 2
    store.bad = ""
    await asyncio.gather(*started(writer, "e1"))
    assert store.existing_parts() == ["e1"]


async def test_a_cancelled_episode_does_not_stop_the_write_of_others(store: SlowStore) -> None:
    writer = EpisodeWriter(store)
    cancelled, other = started(writer, "e0", "e1")
    await until_writing()
    cancelled.cancel()
    store.go_on.release()
    await other
    assert store.existing_parts() == ["e0", "e1"]
