"""Programs that return the node that runs them; with rollout actors, also the nodes of the actors."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from osworld_pipeline.runs.messages import Report
from osworld_pipeline.runs.placement import RayShare
from osworld_pipeline.runs.rollouts.ray_calls import SLACK_S
from osworld_pipeline.runs.rollouts.ray_pool import open_pool


class Located:
    async def node(self) -> str:
        import ray

        return ray.get_runtime_context().get_node_id()


@asynccontextmanager
async def open_located(client_id: str) -> AsyncIterator[Located]:
    yield Located()


def main(job: dict[str, Any], report: Report) -> dict[str, Any]:
    share = RayShare.model_validate(job["ray"])
    return {"actors": asyncio.run(nodes_of_actors(share)) if share.num_rollout_actors else []}


async def nodes_of_actors(share: RayShare) -> list[str]:
    async with open_pool(open_located, share, purpose="placed") as pool:
        return await pool.call_each("node", limit_s=SLACK_S)
