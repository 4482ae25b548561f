"""The Slime-OSWorld endpoints: /reset, /step, /render, /evaluate, /close and /health, as its client calls them."""

import time
from typing import Any

from fastapi import APIRouter, Request, Response

from env_server.api.answers import ObservationWriter
from env_server.api.faults import ERROR_ANSWERS
from env_server.api.opening import CLIENT_CLOSED_REQUEST, open_for_client
from env_server.api.quick_route import QuickRoute
from env_server.episodes.table import EpisodeTable
from osworld_pipeline.wire import (
    CloseAnswer,
    EpisodeRequest,
    EvaluateAnswer,
    HealthAnswer,
    ObservationMessage,
    ResetAnswer,
    ResetRequest,
    StepAnswer,
    StepRequest,
)

INFO: dict[str, dict[str, Any]] = {"DONE": {"done": True}, "FAIL": {"fail": True}}


def slime_router(episodes: EpisodeTable) -> APIRouter:
    router = APIRouter(route_class=QuickRoute, tags=["Slime-OSWorld"], responses=ERROR_ANSWERS)
    pool, writer = episodes.pool, ObservationWriter(episodes.on_timing)

    @router.get("/health", summary="Counts")
    async def health() -> HealthAnswer:
        """Needs no token."""
        return HealthAnswer(
            status="draining" if pool.is_draining else "ok",
            episodes=len(episodes),
            replicas=pool.num_replicas,
            free=pool.num_free,
            active_sessions=len(episodes),
            max_envs=pool.num_replicas,
            can_resend=True,
        )

    @router.post("/reset", summary="Open an episode", response_model=ResetAnswer)
    async def reset(message: ResetRequest, request: Request) -> Response:
        """Waits for a free desktop, sets the task up and returns the first observation."""
        opened = await open_for_client(episodes, message, request)
        if opened is None:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        observation, fields = opened
        return await writer.flat(observation, {**fields, "can_resend": True})

    @router.post("/step", summary="Act once", response_model=StepAnswer)
    async def step(message: StepRequest) -> Response:
        """Executes one action and returns the observation. With `step` it may be sent again."""
        episode = episodes.find(message.episode_id)
        result = await episode.step(
            message.action, pause_s=message.pause, settle=message.settle, number=message.step, note=message.note
        )
        info = INFO.get(result.action, {})
        return await writer.flat(
            result.observation,
            {
                "reward": 0.0,
                "done": result.is_done,
                "step": result.num_steps,
                "num_person_inputs": result.num_person_inputs,
                "info": info,
            },
        )

    @router.post("/render", summary="The last observation", response_model=ObservationMessage)
    async def render(message: EpisodeRequest) -> Response:
        return await writer.flat(episodes.find(message.episode_id).observation, {})

    @router.post("/evaluate", summary="Grade the episode")
    async def evaluate(message: EpisodeRequest) -> EvaluateAnswer:
        """Graded once for the same last step, so the request may be repeated. A touched episode is a 500."""
        start = time.monotonic()
        reward = await episodes.find(message.episode_id).own_reward()
        return EvaluateAnswer(reward=reward, evaluate_s=time.monotonic() - start)

    @router.post("/close", summary="Close the episode")
    async def close(message: EpisodeRequest) -> CloseAnswer:
        """Closing twice is no error."""
        await episodes.close(message.episode_id)
        return CloseAnswer(episode_id=message.episode_id)

    return router
