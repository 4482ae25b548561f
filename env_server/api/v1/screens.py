"""Screens as plain images: of an episode, in the format that the request selects, and of any replica, as a JPEG."""

import time
from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Query, Request, Response

from env_server.api.faults import ERROR_ANSWERS
from env_server.api.pictures import Pictures
from env_server.api.quick_route import QuickRoute
from env_server.api.v1.messages import EpisodeInfo, ReplicaInfo, ReplicaList
from env_server.driving.images import to_format
from env_server.episodes.episode import Episode
from env_server.episodes.table import EpisodeTable
from env_server.replicas.replica import Replica
from osworld_pipeline.wire import ImageFormat

FORMATS: tuple[ImageFormat, ...] = ("png", "jpeg", "webp")
IMAGE_ANSWER: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {f"image/{name}": {"schema": {"type": "string", "format": "binary"}} for name in FORMATS},
        "description": "The image.",
    },
    406: {"description": "Accept names no supported format."},
}
NO_STORE = {"Cache-Control": "no-store"}
FULL_WIDTH = 16_384
"""Wider than any screen, so the image is not reduced."""


def screens_router(episodes: EpisodeTable) -> APIRouter:
    router = APIRouter(responses=ERROR_ANSWERS)
    router.include_router(_replicas_router(episodes))

    @router.get(
        "/episodes/{episode_id}/screenshot",
        summary="The screen as an image",
        response_class=Response,
        responses=IMAGE_ANSWER,
        tags=["episodes"],
    )
    async def screenshot(
        episode_id: str,
        request: Request,
        image_format: Annotated[ImageFormat | None, Query(alias="format")] = None,
        quality: Annotated[int | None, Query(ge=1, le=100)] = None,
        fresh: bool = False,
    ) -> Response:
        """The screenshot of the last observation, or a new one with `fresh`. The format is `format`, else the one that
        Accept prefers, else the episode's own; `quality` applies to the lossy formats."""
        episode = episodes.find(episode_id)
        wanted = image_format or _accepted(request.headers.get("accept", ""), episode)
        seen = await episode.screenshot(wanted, quality) if fresh else episode.observation
        image = seen.screenshot
        if seen.image_format != wanted or (quality is not None and not fresh):
            image = await to_format(image, wanted, quality)
        return Response(image, headers={"Content-Type": f"image/{wanted}", **NO_STORE, "Vary": "Accept"})

    return router


def _replicas_router(episodes: EpisodeTable) -> APIRouter:
    router = APIRouter(prefix="/replicas", route_class=QuickRoute, tags=["replicas"])
    pool = episodes.pool
    pictures = Pictures()

    @router.get("", summary="Every replica and its state")
    async def list_replicas() -> ReplicaList:
        infos = {episode.replica_id: EpisodeInfo.of(episode) for episode in episodes}
        return ReplicaList(
            replicas=tuple(_replica_info(replica, infos.get(replica.replica_id)) for replica in pool.replicas),
            waiting=pool.num_waiting,
        )

    @router.get(
        "/{replica_id}/screenshot",
        summary="The screen of a replica",
        response_class=Response,
        responses={200: {"content": {"image/jpeg": {"schema": {"type": "string", "format": "binary"}}}}},
    )
    async def replica_screenshot(replica_id: str) -> Response:
        """A JPEG: the screen that its episode's client saw last, or else the idle desktop's. The request does not
        affect an episode; 503 while there is no screen."""
        replica = next((found for found in pool.replicas if found.replica_id == replica_id), None)
        if replica is None:
            raise HTTPException(404, f"there is no replica {replica_id[:64]!r}; /v1/replicas lists them")
        episode = next((found for found in episodes if found.replica_id == replica_id), None)
        image = await pictures.of(replica, episode, FULL_WIDTH)
        if image is None:
            raise HTTPException(503, f"replica {replica_id} is {replica.state} and has no screen; ask again")
        return Response(image, headers={"Content-Type": "image/jpeg", **NO_STORE})

    return router


def _replica_info(replica: Replica, episode: EpisodeInfo | None) -> ReplicaInfo:
    return ReplicaInfo(
        replica_id=replica.replica_id,
        state=replica.state,
        state_s=time.monotonic() - replica.state_since,
        num_served=replica.num_served,
        num_starts=replica.num_starts,
        num_failures=replica.num_failures,
        last_error=replica.last_error,
        episode=episode if replica.state == "leased" else None,
    )


def _accepted(accept: str, episode: Episode) -> ImageFormat:
    """Raises HTTPException 406 if no supported format is acceptable."""
    own = episode.view.image_format
    weights: dict[str, float] = {}
    for entry in accept.split(",")[:20]:
        name, *parameters = (part.strip().lower() for part in entry.split(";"))
        weight = next((part[2:] for part in parameters if part.startswith("q=")), "1")
        weights[name] = float(weight) if weight.replace(".", "", 1).isdigit() else 1.0
    weights.pop("", None)
    if not weights:
        return own
    fallback = weights.get("image/*", weights.get("*/*", 0.0))
    # The episode's own format first: at equal weight no image is encoded again.
    ranked = sorted(FORMATS, key=lambda name: (-weights.get(f"image/{name}", fallback), name != own))
    if weights.get(f"image/{ranked[0]}", fallback) <= 0:
        raise HTTPException(406, "the screen is available as image/png, image/jpeg or image/webp; accept one of them")
    return ranked[0]
