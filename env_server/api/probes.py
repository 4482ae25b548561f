"""Liveness, readiness and metrics: for load balancers and for Prometheus."""

from typing import Literal

from fastapi import APIRouter, Response
from pydantic import Field

from env_server.api.answers import json_answer
from env_server.api.quick_route import QuickRoute
from env_server.episodes.table import EpisodeTable
from env_server.metrics import Metrics
from osworld_pipeline.wire import Message
from osworld_pipeline.wire.metrics_endpoint import CONTENT_TYPE


class AliveAnswer(Message):
    status: Literal["ok"] = "ok"


class ReadyAnswer(Message):
    status: Literal["ready", "draining", "no_replica"]
    replicas: dict[str, int] = Field(examples=[{"warm": 3, "leased": 1}])
    """Number of replicas in each state."""
    waiting: int
    """Resets in the queue."""
    episodes: int


def probes_router(episodes: EpisodeTable, metrics: Metrics) -> APIRouter:
    router = APIRouter(route_class=QuickRoute, tags=["probes"])
    pool = episodes.pool

    @router.get("/healthz", summary="Alive")
    async def healthz() -> AliveAnswer:
        """200 while the event loop runs. Needs no token."""
        return AliveAnswer()

    @router.get(
        "/readyz", summary="Ready for episodes", response_model=ReadyAnswer, responses={503: {"model": ReadyAnswer}}
    )
    async def readyz() -> Response:
        """200 while at least one replica is warm or leased and the server is not draining, else 503. Needs no token."""
        counts = pool.count_states()
        has_replica = counts["warm"] + counts["leased"] > 0
        answer = ReadyAnswer(
            status="draining" if pool.is_draining else "ready" if has_replica else "no_replica",
            replicas={str(state): count for state, count in counts.items()},
            waiting=pool.num_waiting,
            episodes=len(episodes),
        )
        return json_answer(answer, status=200 if answer.status == "ready" else 503)

    @router.get("/metrics", summary="Metrics", response_class=Response)
    async def prometheus() -> Response:
        """Prometheus' text format. Needs the token if one is set, unless the server runs with --open-metrics."""
        return Response(metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    return router
