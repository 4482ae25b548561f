"""The program of the storm: episodes of asynchronous GSPO over env servers, with the client, the episodes, the groups
and the store of a real run. Engine and trainer are stubs that wait. It runs until the file `stop` is in its folder, and
writes once a second to `samples.jsonl` what each server answers and how many of its desktops are in use."""

import argparse
import asyncio
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from benchmarks.rollout_stub import STUB_SAMPLING, TimedEngine, TrainAll, stub_renderer, stub_settings, stub_tasks
from osworld_pipeline.dialects import load_dialect
from osworld_pipeline.domain.group import RolloutGroup
from osworld_pipeline.domain.observation import Observation
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.domain.task import Task
from osworld_pipeline.protocols import DesktopInfo, GenerateRequest, GenerateResult
from osworld_pipeline.recipes.schema import RolloutSection
from osworld_pipeline.rollout.async_collector import AsynchronousCollector
from osworld_pipeline.rollout.env_client import EnvClient
from osworld_pipeline.rollout.http_desktop import HttpDesktop
from osworld_pipeline.rollout.run_episode import EpisodePlan, EpisodeTools, run_episode
from osworld_pipeline.rollout.run_group import GroupPlan, in_turn, run_group
from osworld_pipeline.rollout.task_sampling import RoundRobin
from osworld_pipeline.store import TrajectoryStore
from osworld_pipeline.wire import EnvConfig

GROUP_SIZE = 8
NUM_TURNS = 4
MODEL_S = 1.0
TRAIN_S = 1.0
MAX_STALENESS = 8
MAX_UPDATES = 100_000


class _Watched:
    """A desktop of the client that counts while it has an episode."""

    def __init__(self, desktop: HttpDesktop, in_use: Counter[str]) -> None:
        self._desktop, self._in_use = desktop, in_use
        self._url = ""

    async def reset(self, task: Task, *, record_id: str = "") -> tuple[Observation, DesktopInfo]:
        answer = await self._desktop.reset(task, record_id=record_id)
        self._url = self._desktop.base_url
        self._in_use[self._url] += 1
        return answer

    async def act(self, command: str, *, pause_s: float, note: str = "") -> Observation:
        return await self._desktop.act(command, pause_s=pause_s, note=note)

    async def score(self) -> float:
        return await self._desktop.score()

    async def close(self) -> None:
        if self._url:
            self._in_use[self._url] -= 1
        self._url = ""
        await self._desktop.close()


class _VersionedEngine(TimedEngine):
    """Its weights have the number of the update."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        return replace(await super().generate(request), policy_version=self.policy_version)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--urls", required=True)
    parser.add_argument("--slots", type=int, required=True, help="episodes in flight")
    parser.add_argument("--folder", type=Path, required=True)
    arguments = parser.parse_args(argv)
    print(json.dumps(asyncio.run(run(arguments))), flush=True)
    return 0


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Figures of the episodes that were collected."""
    store = TrajectoryStore(StateDir(arguments.folder / "state"))
    renderer = stub_renderer(arguments.folder / "tiny")
    text = load_dialect("slime").format("Wait", {"action": "wait", "time": 1})
    engine = _VersionedEngine(text, renderer.encode(text), latency_s=MODEL_S)
    settings = stub_settings(NUM_TURNS)
    client = EnvClient(
        arguments.urls,
        token=os.environ["ENV_SERVER_TOKEN"],
        env_config=EnvConfig(require_a11y_tree=False),
        client_id="storm",
        may_mix_servers=True,
    )
    async with client:
        await client.connect()
        in_use = Counter[str]()
        tools = EpisodeTools(
            desktop_factory=lambda: _Watched(client.desktop(), in_use), engine=engine, renderer=renderer, sink=store
        )

        async def run_one(task: Task, plan: EpisodePlan) -> Any:
            return await run_episode(task, plan, tools=tools, settings=settings)

        sampling = asyncio.create_task(_sample(arguments.urls.split(","), in_use, arguments.folder / "samples.jsonl"))
        try:
            return await _train(
                in_turn(run_one, arguments.slots),
                engine,
                store,
                groups_per_update=arguments.slots // 32,
                is_over=(arguments.folder / "stop").exists,
            )
        finally:
            sampling.cancel()


async def _sample(urls: Sequence[str], in_use: Counter[str], file: Path) -> None:
    async with httpx.AsyncClient(timeout=2.0, trust_env=False) as http:
        with file.open("w") as samples:
            while True:
                began = time.time()
                answers = await asyncio.gather(*(_ask(http, url) for url in urls))
                servers = {
                    url: {**answer, "in_use": in_use[url]} for url, answer in zip(urls, answers, strict=True) if answer
                }
                samples.write(json.dumps({"at": began, "servers": servers}) + "\n")
                samples.flush()
                await asyncio.sleep(max(0.0, 1.0 - (time.time() - began)))


async def _ask(http: httpx.AsyncClient, url: str) -> dict[str, Any]:
    """Empty if it does not answer."""
    try:
        return (await http.get(f"{url}/health")).json()
    except (httpx.HTTPError, ValueError):
        return {}


async def _train(
    run_one: Any,
    engine: _VersionedEngine,
    store: TrajectoryStore,
    *,
    groups_per_update: int,
    is_over: Callable[[], bool],
) -> dict[str, Any]:
    async def run_one_group(task: Task, group_id: str, update: int) -> RolloutGroup:
        plan = GroupPlan(
            stage_key="storm",
            update=update,
            group_size=GROUP_SIZE,
            checkpoint_id="storm",
            sampling=STUB_SAMPLING,
            max_resamples=1,
        )
        return await run_group(task, plan, group_id, run_one=run_one)

    collector = AsynchronousCollector(
        run_one_group,
        TrainAll(),
        RoundRobin(stub_tasks(40), seed="storm", tasks_per_update=groups_per_update),
        stage_key="storm",
        groups_per_update=groups_per_update,
        section=RolloutSection(mode="asynchronous", max_staleness=MAX_STALENESS),
        num_updates=MAX_UPDATES,
    )
    update, num_episodes = 0, 0
    async with collector:
        while not is_over():
            batch = await collector.collect(update)
            await asyncio.to_thread(store.write_episodes, f"storm-u{update:05d}", batch.episodes)
            await asyncio.to_thread(store.write_groups, f"storm-u{update:05d}", batch.groups, batch.injections)
            num_episodes += len(batch.episodes)
            print(json.dumps({"update": update, "episodes": num_episodes, "at": time.time()}), flush=True)
            await asyncio.sleep(TRAIN_S)
            update += 1
            engine.policy_version = update
            await collector.advance(update)
    return {"updates": update, "episodes": num_episodes}


if __name__ == "__main__":
    sys.exit(main())
