"""Our own API, /v1: episodes with names set by clients, numbered steps, and images in the format and encoding that each
request selects."""

import time
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version

from fastapi import APIRouter, Request, Response

from env_server.api.answers import ObservationWriter
from env_server.api.faults import ERROR_ANSWERS
from env_server.api.opening import CLIENT_CLOSED_REQUEST, open_for_client
from env_server.api.quick_route import QuickRoute
from env_server.api.v1.messages import (
    CordonRequest,
    DrainAnswer,
    DrainRequest,
    EpisodeInfo,
    EpisodeList,
    EvaluationReply,
    ObservationReply,
    OpenAnswer,
    OpenRequest,
    ServerInfo,
    StepMessage,
    StepReply,
)
from env_server.api.v1.person import person_router
from env_server.api.v1.screens import screens_router
from env_server.episodes.table import EpisodeTable
from env_server.settings import Settings
from osworld_pipeline.wire.protocol import PROTOCOL

SURFACES = ("/v1", "slime", "areal", "osgym")
MULTIPART = {"multipart/mixed": {"schema": {"type": "string", "format": "binary"}}}
"""Two parts, the JSON without the image and the raw image, for requests whose Accept header asks for them."""
FRESH = {
    "parameters": [
        {
            "name": "fresh",
            "in": "query",
            "required": False,
            "schema": {"type": "boolean", "default": False},
            "description": "Take a new observation.",
        }
    ]
}


def own_router(episodes: EpisodeTable, settings: Settings, drain: Callable[[float], float]) -> APIRouter:
    router = APIRouter(prefix="/v1")
    router.include_router(_episodes_router(episodes))
    router.include_router(screens_router(episodes))
    router.include_router(person_router(episodes, settings))
    router.include_router(_server_router(episodes, settings, drain))
    return router


def _episodes_router(episodes: EpisodeTable) -> APIRouter:
    router = APIRouter(prefix="/episodes", route_class=QuickRoute, tags=["episodes"], responses=ERROR_ANSWERS)
    writer = ObservationWriter(episodes.on_timing)

    @router.post(
        "",
        summary="Open an episode",
        status_code=201,
        response_model=OpenAnswer,
        responses={201: {"content": MULTIPART}},
    )
    async def open_episode(message: OpenRequest, request: Request) -> Response:
        """Waits for a free desktop, sets the task up, and returns the first observation. Sent again with the same
        `request_id` after a lost answer, it returns the same episode."""
        opened = await open_for_client(episodes, message, request)
        if opened is None:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        observation, fields = opened
        return await writer.nested(observation, fields, accept=_accept(request), status=201)

    @router.get("", summary="The live episodes")
    async def list_episodes() -> EpisodeList:
        return EpisodeList(episodes=tuple(EpisodeInfo.of(episode) for episode in episodes))

    @router.get("/{episode_id}", summary="One live episode")
    async def get_episode(episode_id: str) -> EpisodeInfo:
        return EpisodeInfo.of(episodes.find(episode_id))

    @router.post(
        "/{episode_id}/steps", summary="Act once", response_model=StepReply, responses={200: {"content": MULTIPART}}
    )
    async def step(episode_id: str, message: StepMessage, request: Request) -> Response:
        """Executes one action and returns the observation. With its number a step may be sent again."""
        episode = episodes.find(episode_id)
        view = episode.view
        if message.image_format is not None or message.image_quality is not None:
            image_format = message.image_format or view.image_format
            view = replace(view, image_format=image_format, image_quality=message.image_quality)
        result = await episode.step(
            message.action,
            pause_s=message.pause,
            settle=message.settle,
            number=message.step,
            view=view,
            note=message.note,
        )
        fields = {
            "step": result.num_steps,
            "action": result.action,
            "is_done": result.is_done,
            "is_repeated": result.is_repeated,
            "num_person_inputs": result.num_person_inputs,
        }
        return await writer.nested(result.observation, fields, accept=_accept(request))

    @router.get(
        "/{episode_id}/observation",
        summary="The last observation",
        response_model=ObservationReply,
        responses={200: {"content": MULTIPART}},
        openapi_extra=FRESH,
    )
    async def observe(episode_id: str, request: Request) -> Response:
        """The observation of the last step, or of the opening, unless a new one is requested."""
        episode = episodes.find(episode_id)
        is_fresh = request.query_params.get("fresh", "").lower() in ("1", "true", "yes")
        observation = await episode.look() if is_fresh else episode.observation
        return await writer.nested(observation, {}, accept=_accept(request))

    @router.post("/{episode_id}/evaluation", summary="Grade the episode")
    async def evaluate(episode_id: str) -> EvaluationReply:
        """The grader's reward in 0..1; graded once for the same last step, so the request may be repeated. A grader
        that crashed is a 500 with `grader_fault`, never a reward."""
        start = time.monotonic()
        episode = episodes.find(episode_id)
        reward = await episode.evaluate()
        return EvaluationReply(
            reward=reward,
            evaluate_s=time.monotonic() - start,
            grader_version=episodes.drivers.grader_version,
            num_person_inputs=episode.num_person_inputs,
        )

    @router.post("/{episode_id}/recording/start", summary="Begin a video", status_code=204, response_class=Response)
    async def start_recording(episode_id: str) -> Response:
        """Records the desktop until the end is requested; 409 where the desktop cannot record or already records."""
        await episodes.find(episode_id).start_recording()
        return Response(status_code=204)

    @router.post(
        "/{episode_id}/recording/end",
        summary="End the video and get it",
        response_class=Response,
        responses={200: {"content": {"video/mp4": {"schema": {"type": "string", "format": "binary"}}}}},
    )
    async def end_recording(episode_id: str) -> Response:
        """409 where no recording was started."""
        return Response(await episodes.find(episode_id).end_recording(), headers={"Content-Type": "video/mp4"})

    @router.delete("/{episode_id}", summary="Close the episode", status_code=204, response_class=Response)
    async def close(episode_id: str) -> Response:
        """Closing twice is no error; an unknown id is a 404."""
        await episodes.close(episode_id)
        return Response(status_code=204)

    return router


def _server_router(episodes: EpisodeTable, settings: Settings, drain: Callable[[float], float]) -> APIRouter:
    router = APIRouter(route_class=QuickRoute, tags=["server"], responses=ERROR_ANSWERS)
    pool, started_at = episodes.pool, time.monotonic()

    @router.get("/server", summary="Information about this server")
    async def server() -> ServerInfo:
        """Versions, desktops, grader and limits: everything that measurements of episodes depend on."""
        return ServerInfo(
            version=version("osworld-pipeline"),
            protocol=PROTOCOL,
            provider=pool.provider.name,
            image_digest=pool.provider.image_digest,
            grader_version=episodes.drivers.grader_version,
            details=pool.provider.details,
            screen_size=settings.screen,
            num_replicas=pool.num_replicas,
            is_draining=pool.is_draining,
            uptime_s=time.monotonic() - started_at,
            surfaces=SURFACES,
            limits={
                "queue_timeout_s": settings.queue_timeout_s,
                "idle_ttl_s": settings.idle_ttl_s,
                "drain_episodes_s": settings.drain_episodes_s,
                "drain_timeout_s": settings.drain_timeout_s,
                "max_body_bytes": settings.max_body_bytes,
                "setup_timeout_s": settings.limits.setup_timeout_s,
                "evaluate_timeout_s": settings.limits.evaluate_timeout_s,
                "sleep_s": settings.limits.sleep_s,
                "download_max_bytes": settings.limits.download_max_bytes,
            },
        )

    @router.post("/server/cordon", summary="Refuse or accept new episodes", status_code=204, response_class=Response)
    async def cordon(message: CordonRequest) -> Response:
        """Live episodes continue. While cordoned, /health says `draining` and /readyz is 503; clients with several
        servers use the others."""
        pool.cordon(is_cordoned=message.is_cordoned)
        return Response(status_code=204)

    @router.post("/server/drain", summary="Let the live episodes end, then end the server")
    async def drain_server(message: DrainRequest) -> DrainAnswer:
        """Does the same as SIGTERM, with the given deadline: new episodes are refused, live ones continue until the
        deadline, the rest are closed, and the server exits. It cannot be undone; the earliest deadline applies."""
        pool.drain()
        return DrainAnswer(num_episodes=episodes.num_open, left_s=drain(message.deadline_s))

    return router


def _accept(request: Request) -> str:
    return request.headers.get("accept", "")
