"""Opens an episode for an HTTP client. If the client disconnects meanwhile, no desktop is held for it."""

import time
from collections.abc import Mapping
from typing import Any, Protocol

from fastapi import Request

from env_server.episodes.table import EpisodeTable, Opened
from osworld_pipeline.domain.observation import Observation
from osworld_pipeline.wire import EnvConfig
from osworld_pipeline.wire.waiting import while_connected

CLIENT_CLOSED_REQUEST = 499


class Asked(Protocol):
    """A message that asks for an episode."""

    @property
    def task_config(self) -> dict[str, Any]: ...

    @property
    def env_config(self) -> EnvConfig: ...

    @property
    def client_id(self) -> str: ...

    @property
    def request_id(self) -> str: ...

    @property
    def record_id(self) -> str: ...

    @property
    def queue_s(self) -> float | None: ...


def client_of(request: Request) -> str:
    """The client id for the queue of a request that names none: its address."""
    return request.client.host if request.client else ""


async def open_unless_gone(
    episodes: EpisodeTable,
    task_config: Mapping[str, Any],
    env_config: EnvConfig,
    *,
    client_id: str,
    request_id: str,
    request: Request,
    queue_s: float | None = None,
) -> Opened | None:
    """None if the client disconnected; for a named request the opened episode is kept for a few seconds for a retry.

    Raises:
        PipelineError: as EpisodeTable.open.
    """

    async def undo(opened: Opened) -> None:
        if request_id:
            episodes.hang_up(client_id, request_id)
        else:
            await episodes.close(opened[0].episode_id, "its client disconnected during reset", outcome="client_gone")

    opening = episodes.open(task_config, env_config, client_id=client_id, request_id=request_id, queue_s=queue_s)
    return await while_connected(request, opening, undo=undo)


async def open_for_client(
    episodes: EpisodeTable, message: Asked, request: Request
) -> tuple[Observation, dict[str, Any]] | None:
    """The first observation, and the fields about the episode for its client. Returns None and raises errors as
    open_unless_gone does."""
    start = time.monotonic()
    opened = await open_unless_gone(
        episodes,
        message.task_config,
        message.env_config,
        client_id=message.client_id or client_of(request),
        request_id=message.request_id,
        request=request,
        queue_s=message.queue_s,
    )
    if opened is None:
        return None
    episode, observation = opened
    episode.record_id = message.record_id
    provider = episodes.pool.provider
    return observation, {
        "episode_id": episode.episode_id,
        "replica_id": episode.replica_id,
        "provider": provider.name,
        "image_digest": provider.image_digest,
        "grader_version": episodes.drivers.grader_version,
        "reset_s": time.monotonic() - start,
    }
