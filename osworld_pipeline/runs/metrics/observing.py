"""Where the metrics of this process get their figures from. If it serves none, nothing is observed."""

from contextlib import AbstractContextManager, nullcontext

from osworld_pipeline.domain.episode import Episode, Outcome
from osworld_pipeline.domain.task import Task
from osworld_pipeline.rollout.async_collector import AsynchronousCollector
from osworld_pipeline.rollout.collector import Collector
from osworld_pipeline.rollout.env_fleet import EnvFleet
from osworld_pipeline.rollout.run_episode import EpisodePlan, RunEpisode
from osworld_pipeline.rollout.utilisation import BusyMeter, metered
from osworld_pipeline.runs.metrics.serving import Current

PLAYBACK = "playback"
"""The purpose of a playback in the count of episodes."""


def observed_episodes(run_one: RunEpisode, meter: BusyMeter) -> RunEpisode:
    """The same function; the meter runs while an episode runs, and episodes are counted. The program also counts the
    episodes that actors run."""
    run = metered(run_one, meter)
    metrics = Current.metrics
    if metrics is None:
        return run

    async def observed(task: Task, plan: EpisodePlan) -> Episode:
        episode = await run(task, plan)
        metrics.on_episode(episode)
        return episode

    return observed


def on_playback(outcome: Outcome, *, num_steps: int) -> None:
    """A playback of a demonstration is over."""
    if Current.metrics is not None:
        Current.metrics.on_end(outcome, PLAYBACK, num_steps=num_steps)


def watching_meter(part: str, meter: BusyMeter) -> AbstractContextManager[None]:
    """`part`: environments, engine or trainer."""
    metrics = Current.metrics
    return nullcontext() if metrics is None else metrics.live.watching_meter(part, meter)


def watching_fleet(fleet: EnvFleet) -> AbstractContextManager[None]:
    metrics = Current.metrics
    return nullcontext() if metrics is None else metrics.live.fleets.watching(fleet)


def watching_groups(collector: Collector) -> AbstractContextManager[None]:
    """A synchronous collector has no groups that wait."""
    metrics = Current.metrics
    if metrics is None or not isinstance(collector, AsynchronousCollector):
        return nullcontext()
    return metrics.live.collectors.watching(collector)
