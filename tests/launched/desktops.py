"""A program that asks the env servers of its job how many desktops they have; its ranks add up their counts."""

import asyncio
import os
from typing import Any

from pydantic import TypeAdapter

from osworld_pipeline.rollout.env_client import EnvClient
from osworld_pipeline.runs.messages import Info, Report
from osworld_pipeline.runs.rollouts.embedded_server import EnvServers


def main(job: dict[str, Any], report: Report) -> dict[str, Any]:
    servers = TypeAdapter(EnvServers).validate_python(job["servers"])
    report(Info(message=f"rank {os.environ.get('RANK', '0')}"))
    return {"desktops": asyncio.run(num_desktops(servers)), "has_token": bool(servers.token)}


async def num_desktops(servers: EnvServers) -> int:
    """The number of desktops, once all have started."""
    async with EnvClient(servers.urls, token=servers.token) as client:
        await client.connect()
        async with asyncio.timeout(60):
            while (found := sum(one.replicas for one in await client.health())) < servers.num_replicas:  # noqa: ASYNC110 - other processes
                await asyncio.sleep(0.2)
        return found
