"""A program whose episodes run on Ray actors, and the stub session that they open. `job`: once, many, at_start (folders
with one file per kill: of the actor of one episode, of the actor of another, and of an actor that starts)."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from osworld_pipeline.domain.episode import Episode, EpisodePurpose, Outcome, Reward, SamplingParams
from osworld_pipeline.domain.task import Task
from osworld_pipeline.recipes import load_recipe
from osworld_pipeline.rollout.run_episode import EpisodePlan
from osworld_pipeline.runs.messages import Report
from osworld_pipeline.runs.placement import RayShare
from osworld_pipeline.runs.rollouts.ray_actor import Weights
from osworld_pipeline.runs.rollouts.ray_pool import open_pool
from osworld_pipeline.runs.rollouts.ray_rollouts import RayRollouts
from osworld_pipeline.runs.rollouts.session import episode_settings

TASK = Task.from_config({"id": "t", "instruction": "Do it.", "evaluator": {"func": "exact"}})
SAMPLING = SamplingParams(temperature=1.0, max_new_tokens=8, seed=0)


def die_once(folder: Path) -> None:
    """Kills this process once for each file."""
    for path in folder.iterdir():
        path.unlink()
        os.kill(os.getpid(), signal.SIGKILL)


class StubSession:
    """Episodes take a moment. An episode named `deadly` kills its actor once for each file in its folder."""

    def __init__(self, weights: Weights, client_id: str) -> None:
        self.weights = weights
        self.client_id = client_id

    async def run_episode(self, task: Task, plan: EpisodePlan) -> Episode:
        await asyncio.sleep(0.2)
        if plan.episode_id.startswith("deadly"):
            die_once(Path(plan.run_ids["folder"]))
        return Episode(
            episode_id=plan.episode_id,
            task_id=task.task_id,
            task_digest=task.config_digest,
            purpose=plan.purpose,
            checkpoint_id=plan.checkpoint_id,
            engine=f"stub {self.weights.policy_version}",
            sampling=plan.sampling,
            outcome=Outcome.SUCCESS,
            reward=Reward(task=1.0, shaped=1.0),
            replica_id=self.client_id,
        )

    async def client(self) -> str:
        return self.client_id

    async def load_weights(self, weights: Weights) -> None:
        self.weights = weights


@asynccontextmanager
async def open_stub(at_start: Path, weights: Weights, client_id: str) -> AsyncIterator[Any]:
    die_once(at_start)
    yield StubSession(weights, client_id)


def plan(episode_id: str, folder: str = "") -> EpisodePlan:
    return EpisodePlan(
        episode_id=episode_id,
        purpose=EpisodePurpose.TRAIN,
        checkpoint_id="c",
        sampling=SAMPLING,
        run_ids={"folder": folder},
    )


def main(job: dict[str, Any], report: Report) -> dict[str, Any]:
    return asyncio.run(run(job))


async def run(job: dict[str, Any]) -> dict[str, Any]:
    share = RayShare.model_validate(job["ray"])
    weights = Weights(folder=Path("/weights"))
    settings = episode_settings(load_recipe("smoke"), max_turns=2)
    at_start = Path(job["at_start"])
    open_with = partial(open_stub, at_start)
    async with open_pool(partial(open_with, weights), share, purpose="test") as pool:
        for number in range(2):
            (at_start / str(number)).touch()
        rollouts = RayRollouts(pool, open_with, settings=settings, engine_name="stub")
        ids = ["deadly-0", *(f"calm-{number}" for number in range(5))]
        first = await asyncio.gather(*(rollouts(TASK, plan(name, job["once"])) for name in ids))
        await rollouts.load_weights(Weights(folder=Path("/weights"), policy_version=7))
        second = await asyncio.gather(*(rollouts(TASK, plan(f"new-{number}")) for number in range(4)))
        num_running = len(await pool.call_each("client", limit_s=60))
        async with asyncio.timeout(300):
            while len(await pool.call_each("client", limit_s=60)) < 2:  # noqa: ASYNC110 - other processes
                await asyncio.sleep(0.2)
        third = await asyncio.gather(*(rollouts(TASK, plan(f"both-{number}")) for number in range(4)))
        hopeless = await rollouts(TASK, plan("deadly-1", job["many"]))
        return {
            "first": [summary(episode) for episode in first],
            "second": [summary(episode) for episode in second],
            "num_running": num_running,
            "third": [summary(episode) for episode in third],
            "hopeless": summary(hopeless),
            "num_lost": rollouts.num_lost,
        }


def summary(episode: Episode) -> dict[str, Any]:
    return {
        "id": episode.episode_id,
        "outcome": str(episode.outcome),
        "attempt": episode.attempt,
        "earlier_faults": list(episode.earlier_faults),
        "engine": episode.engine,
        "client": episode.replica_id,
        "has_reward": episode.reward is not None,
        "error": episode.error,
    }
