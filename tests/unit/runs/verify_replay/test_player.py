"""Playbacks on actors that are lost. No Ray is started."""

from typing import Any, cast

from osworld_pipeline.domain.episode import Outcome
from osworld_pipeline.domain.task import Task
from osworld_pipeline.recipes import load_recipe
from osworld_pipeline.runs.rollouts.ray_calls import LostActorError
from osworld_pipeline.runs.rollouts.ray_pool import ActorPool
from osworld_pipeline.runs.verify_replay.playback_plan import Playback
from osworld_pipeline.runs.verify_replay.player import play_on

TASK = Task.from_config({"id": "t", "instruction": "Do it.", "evaluator": {"func": "exact"}})
PLAYBACK = cast(Playback, object())


class Pool:
    """A pool with one actor."""

    index = 3

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.calls: list[tuple[Any, ...]] = []

    async def least_busy(self) -> "Pool":
        return self

    async def call(self, actor: "Pool", method: str, *arguments: Any, limit_s: float) -> Any:
        self.calls.append((actor.index, method, *arguments))
        assert limit_s > 600 + 60 + 120, "reset, actions and evaluation may take that long"
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


async def test_an_actor_plays_with_the_pause_that_it_is_given() -> None:
    pool = Pool("played")
    assert await play_on(cast(ActorPool, pool), load_recipe("smoke"), PLAYBACK, TASK, 0.5) == "played"
    assert pool.calls == [(3, "play", PLAYBACK, TASK, 0.5)]


async def test_a_lost_actor_is_a_fault_without_a_reward() -> None:
    pool = Pool(LostActorError("it died (killed)"))
    played = await play_on(cast(ActorPool, pool), load_recipe("smoke"), PLAYBACK, TASK, 0.5)
    assert (played.outcome, played.reward) == (Outcome.ENV_FAULT, None)
    assert played.error == "rollout actor 3: it died (killed)"
