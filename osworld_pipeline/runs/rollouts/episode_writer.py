"""Stores the episodes of concurrent coroutines: those that end during a write share the next one (group commit)."""

import asyncio

from osworld_pipeline.domain.episode import Episode
from osworld_pipeline.store import TrajectoryStore

MAX_EPISODES = 256
"""Limit of the episodes in one write. A kill loses the episodes that are not written yet; they run again."""


class EpisodeWriter:
    """A writer for one event loop. Each episode is a part of its own, named like it."""

    def __init__(self, store: TrajectoryStore) -> None:
        self._store = store
        self._in_write = asyncio.Lock()
        self._next: tuple[dict[str, list[Episode]], asyncio.Task[None]] | None = None
        """The parts of the next write, and the task that will write them."""

    async def write(self, episode: Episode) -> None:
        """Returns when the episode is stored. Raises StoreError."""
        if self._next is None or len(self._next[0]) >= MAX_EPISODES:
            parts: dict[str, list[Episode]] = {}
            self._next = parts, asyncio.create_task(self._write(parts))
        parts, writing = self._next
        parts[episode.episode_id] = [episode]
        await asyncio.shield(writing)

    async def _write(self, parts: dict[str, list[Episode]]) -> None:
        async with self._in_write:
            if self._next is not None and self._next[0] is parts:
                self._next = None  # complete: later episodes share the next write
            await asyncio.to_thread(self._store.write_new_parts, parts)
