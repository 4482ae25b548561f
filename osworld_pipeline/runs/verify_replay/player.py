"""Plays demonstrations on the desktops of a job: from its program, or from Ray actors if the job names some."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from osworld_pipeline.domain.episode import Outcome
from osworld_pipeline.domain.grounds import Grounds, all_grounds
from osworld_pipeline.domain.task import Task
from osworld_pipeline.recipes import Recipe
from osworld_pipeline.rollout.env_client import EnvClient
from osworld_pipeline.runs.metrics.observing import on_playback
from osworld_pipeline.runs.rollouts.env_servers import open_env_client
from osworld_pipeline.runs.rollouts.ray_calls import SLACK_S, LostActorError
from osworld_pipeline.runs.rollouts.ray_pool import ActorPool, open_pool
from osworld_pipeline.runs.verify_replay.job import VerificationJob
from osworld_pipeline.runs.verify_replay.playback import NO_INFO, Play, PlaybackLimits, PlayedBack, play_back
from osworld_pipeline.runs.verify_replay.playback_plan import Playback

PURPOSE = "verify_replay"


@dataclass(frozen=True, kw_only=True)
class Player:
    play: Play
    grounds: frozenset[Grounds] | None
    """The images and graders of the env servers at the start; None if one of them does not report its own."""


@asynccontextmanager
async def open_player(job: VerificationJob) -> AsyncIterator[Player]:
    """Raises EnvServerError, EngineError: no env server answers, or no actor starts."""
    if job.actors is None:
        async with _open_playback(job, PURPOSE) as playback:
            yield Player(play=_observed(playback.play), grounds=await playback.grounds())
        return
    without_gpu = job.actors.rollout_actor.model_copy(update={"gpus": 0.0})
    share = job.actors.model_copy(update={"rollout_actor": without_gpu})
    async with open_pool(partial(_open_playback, job), share, purpose=PURPOSE) as pool:
        reported = await pool.call_each("grounds", limit_s=SLACK_S)
        yield Player(play=_observed(partial(play_on, pool, job.recipe)), grounds=all_grounds(reported))


def _observed(play: Play) -> Play:
    async def observed(playback: Playback, task: Task, pause_s: float) -> PlayedBack:
        played = await play(playback, task, pause_s)
        on_playback(played.outcome, num_steps=played.num_steps)
        return played

    return observed


@dataclass(frozen=True, kw_only=True)
class _Playback:
    """Plays on the desktops of one client, in a program or in an actor."""

    recipe: Recipe
    client: EnvClient

    async def grounds(self) -> frozenset[Grounds] | None:
        return self.client.fleet.grounds()

    async def play(self, playback: Playback, task: Task, pause_s: float) -> PlayedBack:
        return await play_back(
            playback,
            task,
            desktop=self.client.desktop(),
            pause_s=pause_s,
            threshold=self.recipe.replay.threshold,
            limits=_limits(self.recipe),
        )


@asynccontextmanager
async def _open_playback(job: VerificationJob, purpose: str) -> AsyncIterator[_Playback]:
    async with open_env_client(job.recipe, job.state, job.servers, purpose=purpose) as client:
        yield _Playback(recipe=job.recipe, client=client)


async def play_on(pool: ActorPool, recipe: Recipe, playback: Playback, task: Task, pause_s: float) -> PlayedBack:
    """Plays on the actor with the fewest playbacks. The loss of the actor is an env_fault. Raises EnvServerError if
    the env server is unreachable, EngineError if no actor starts."""
    limits, started_at, start = _limits(recipe), time.time(), time.monotonic()
    limit_s = limits.reset_s + limits.actions_s + limits.evaluate_s + SLACK_S
    actor = await pool.least_busy()
    try:
        return await pool.call(actor, "play", playback, task, pause_s, limit_s=limit_s)
    except LostActorError as error:
        return PlayedBack(
            outcome=Outcome.ENV_FAULT,
            reward=None,
            error=f"rollout actor {actor.index}: {error}",
            num_steps=0,
            info=NO_INFO,
            started_at=started_at,
            duration_s=time.monotonic() - start,
        )


def _limits(recipe: Recipe) -> PlaybackLimits:
    return PlaybackLimits(actions_s=recipe.gspo.episode_timeout_s)
