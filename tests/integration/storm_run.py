"""The program of the storm: asynchronous GSPO over env servers, as it is launched, with a tiny policy that was taught
to wait. It runs for the given time, and writes once a second to `samples.jsonl` what each server answers and how many
of its desktops are in use."""

import argparse
import asyncio
import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks.rollout_stub import TimedDesktop, TimedEngine, draw_screens, stub_tasks
from osworld_pipeline.agent.processor import load_processor
from osworld_pipeline.agent.renderer import Renderer
from osworld_pipeline.dialects import load_dialect
from osworld_pipeline.domain.checkpoint import Stage
from osworld_pipeline.domain.episode import EpisodePurpose, SamplingParams
from osworld_pipeline.domain.observation import Observation
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.domain.task import Task
from osworld_pipeline.protocols import DesktopInfo
from osworld_pipeline.recipes import Recipe, load_recipe
from osworld_pipeline.rollout.http_desktop import HttpDesktop
from osworld_pipeline.rollout.run_episode import EpisodePlan, EpisodeTools, run_episode
from osworld_pipeline.rollout.trajectories import episode_trajectories
from osworld_pipeline.runs.base import make_base
from osworld_pipeline.runs.budget import Budget
from osworld_pipeline.runs.gspo import train_gspo
from osworld_pipeline.runs.gspo.job import GspoJob
from osworld_pipeline.runs.job import Policy, StageJob
from osworld_pipeline.runs.messages import Info, Message, Metrics, Warned
from osworld_pipeline.runs.rollouts.embedded_server import EnvServers
from osworld_pipeline.runs.rollouts.session import episode_settings
from osworld_pipeline.store import TrajectoryStore
from osworld_pipeline.tables.owned import write_table
from osworld_pipeline.training.distributed.process_group import ProcessGroup
from osworld_pipeline.training.policy_trainer import open_sft_trainer

GROUP_SIZE = 8
GROUPS_PER_UPDATE = 16
NUM_TURNS = 4
NUM_TASKS = 40
NUM_LESSONS = 160
"""Updates in which the policy learns to wait."""
MAX_UPDATES = 100_000


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--urls", required=True)
    parser.add_argument("--slots", type=int, required=True, help="episodes in flight")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    arguments = parser.parse_args(argv)
    urls, state = tuple(arguments.urls.split(",")), StateDir(arguments.folder / "state")
    recipe = storm_recipe(arguments.slots)
    write_tasks(state)
    parent = taught_policy(state, recipe)
    in_use = watched_desktops()
    watch = threading.Thread(
        target=lambda: asyncio.run(_sample(urls, in_use, arguments.folder / "samples.jsonl")), daemon=True
    )
    watch.start()
    reported: dict[int, Metrics] = {}

    def report(message: Message) -> None:
        if isinstance(message, Metrics):
            reported[message.update] = message
        elif isinstance(message, Info | Warned):
            print(message.message, flush=True)

    job = GspoJob(
        recipe=recipe,
        stage=Stage.GSPO_PHASE1,
        state_root=state.root,
        checkpoint_id="gspo_phase1-storm",
        parent=parent,
        data_digest="storm",
        servers=EnvServers(urls=urls, token=os.environ["ENV_SERVER_TOKEN"], num_replicas=arguments.slots),
        budget=Budget(deadline=time.time() + arguments.seconds),
    )
    result = train_gspo.main(job, report)
    print(
        json.dumps({**result, "updates": [dict(reported[number].metrics) for number in sorted(reported)]}), flush=True
    )
    return 0


def storm_recipe(num_slots: int) -> Recipe:
    # Enough groups may run ahead that all desktops have an episode while an update is trained.
    max_staleness = -(-2 * num_slots // (GROUP_SIZE * GROUPS_PER_UPDATE))
    return load_recipe(
        "smoke",
        settings=[
            *("rollout.mode=asynchronous", f"rollout.max_staleness={max_staleness}"),
            *(f"rollout.max_concurrent_episodes={num_slots}", f"desktop.num_replicas={num_slots}"),
            *("desktop.may_mix_servers=true", "desktop.pause_s=0", "reward.shaping=none"),
            *(f"agent.max_turns={NUM_TURNS}", "agent.max_pixels=16384"),
            *(f"gspo.group_size={GROUP_SIZE}", f"gspo.tasks_per_update={GROUPS_PER_UPDATE}"),
            *("gspo.learning_rate=1e-6", "gspo.episode_timeout_s=1200", "gspo.turn_timeout_s=300"),
            *(f"gspo.phase1.num_updates={MAX_UPDATES}", "gspo.phase1.temperature=1.0", "trainer.save_every=10"),
            *(f"sft.num_updates={NUM_LESSONS}", "sft.learning_rate=3e-3"),
        ],
    )


def write_tasks(state: StateDir) -> None:
    write_table(
        state,
        "train_tasks",
        [
            {"task_id": task.task_id, "domain": task.domain, "task_config": json.dumps(dict(task.config))}
            for task in stub_tasks(NUM_TASKS)
        ],
    )
    write_table(state, "replay_buffer", [])


def taught_policy(state: StateDir, recipe: Recipe) -> Policy:
    """A policy that waits in each of its turns. The storm shows rollouts and training, not what is learned."""
    base = StageJob(recipe=recipe, state_root=state.root, stage=Stage.BASE, checkpoint_id="base-1", data_digest="d")
    make_base.main(base, lambda message: None)
    folder = state.checkpoints / "base-1"
    trainer = open_sft_trainer(folder, recipe=recipe, process_group=ProcessGroup.alone())
    episodes = [asyncio.run(_lesson(state, recipe, task)) for task in stub_tasks(2)]
    store = TrajectoryStore(state)
    lessons = [one for episode in episodes for one in episode_trajectories(episode, store.read_blob)]
    losses = [trainer.update(lessons)["loss"] for _ in range(NUM_LESSONS)]
    print(f"the policy waits: loss {losses[-1]:.3g}", flush=True)
    trainer.save_weights(state.checkpoints / "taught")()
    return Policy(checkpoint_id="taught", path="checkpoints/taught")


async def _lesson(state: StateDir, recipe: Recipe, task: Task) -> Any:
    """An episode of an engine that always waits."""
    renderer = Renderer(load_processor(state.checkpoints / "base-1"))
    dialect = load_dialect(recipe.agent.dialect, recipe.agent.coordinate_space)
    text = dialect.format("Wait", {"action": "wait", "time": 1})
    tools = EpisodeTools(
        desktop_factory=lambda: TimedDesktop(draw_screens(64, 64, 1)),
        engine=TimedEngine(text, [*renderer.encode(text), renderer.im_end_id], latency_s=0.0),
        renderer=renderer,
        sink=TrajectoryStore(state),
    )
    plan = EpisodePlan(
        episode_id=f"lesson-{task.task_id}",
        purpose=EpisodePurpose.DEMONSTRATE,
        checkpoint_id="base-1",
        sampling=SamplingParams(temperature=1.0, max_new_tokens=32, stop=()),
        seed=0,
    )
    return await run_episode(task, plan, tools=tools, settings=episode_settings(recipe, max_turns=NUM_TURNS))


def watched_desktops() -> Counter[str]:
    """Counts from now on, by server, the desktops that have an episode of this program."""
    in_use = Counter[str]()
    reset, close = HttpDesktop.reset, HttpDesktop.close
    places: dict[int, str] = {}

    async def counted_reset(self: HttpDesktop, task: Task, *, record_id: str = "") -> tuple[Observation, DesktopInfo]:
        answer = await reset(self, task, record_id=record_id)
        places[id(self)] = self.base_url
        in_use[self.base_url] += 1
        return answer

    async def counted_close(self: HttpDesktop) -> None:
        url = places.pop(id(self), None)
        if url is not None:
            in_use[url] -= 1
        await close(self)

    HttpDesktop.reset, HttpDesktop.close = counted_reset, counted_close  # type: ignore[method-assign]
    return in_use


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
    """The answer of a server to /health; empty if it does not answer."""
    try:
        return (await http.get(f"{url}/health")).json()
    except (httpx.HTTPError, ValueError):
        return {}


if __name__ == "__main__":
    sys.exit(main())
