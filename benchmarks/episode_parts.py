"""Parts of an episode's time: the demo's tasks, solved by their scripts on real local desktops, while the demo's
model samples as many tokens as the script's text has."""

import asyncio
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from benchmarks.cpu_clock import CpuClock
from benchmarks.spread import Spread, print_table, verdict
from osworld_pipeline.agent.images import fit_size
from osworld_pipeline.agent.processor import load_processor
from osworld_pipeline.dialects import load_dialect
from osworld_pipeline.dialects.actions import move_points
from osworld_pipeline.dialects.coordinates import from_screen
from osworld_pipeline.domain.checkpoint import Stage
from osworld_pipeline.domain.episode import Episode, EpisodePurpose, Outcome
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.domain.task import Task
from osworld_pipeline.evaluation.suites import SuiteTask
from osworld_pipeline.protocols import GenerateRequest, GenerateResult, PolicyEngine
from osworld_pipeline.recipes import Recipe, load_recipe
from osworld_pipeline.rollout.run_episode import EpisodePlan, episode_runner
from osworld_pipeline.rollout.run_group import gather_episodes, in_turn
from osworld_pipeline.runs.base import make_base
from osworld_pipeline.runs.checkpoints.ids import recipe_suite
from osworld_pipeline.runs.job import StageJob
from osworld_pipeline.runs.rollouts.embedded_server import EnvServers, ServerSpec, embedded_env_server
from osworld_pipeline.runs.rollouts.session import RolloutSession, episode_settings, rollout_session, sampling_params

RECIPE = "demo"
EPISODES_PER_S = 3.0
"""Required rate on two cores."""
NUM_EPISODES = 80
BASE = "base-bench"
SERVER_PARTS = {
    "waiting for a free desktop": ("env_server_queue_seconds", {}),
    "set-up of the task": ("env_server_reset_seconds", {}),
    "action and pause": ("env_server_step_seconds", {"part": "act"}),
    "screenshot after it": ("env_server_step_seconds", {"part": "observe"}),
    "its encoding": ("env_server_step_seconds", {"part": "encode"}),
    "grading": ("env_server_evaluate_seconds", {}),
}
"""Times measured by the env server, with their names in its /metrics."""


class ScriptedEngine:
    """The model samples, but the script's text replaces its response."""

    uses_chat_api = False

    def __init__(self, engine: PolicyEngine, scripts: Mapping[str, Sequence[tuple[str, tuple[int, ...]]]]) -> None:
        """`scripts`: the turns of each episode as text and tokens."""
        self.name = engine.name
        self._engine = engine
        self._left = {episode_id: iter(script) for episode_id, script in scripts.items()}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        text, token_ids = next(self._left[request.episode_id.rpartition("-a")[0]])
        sampling = replace(request.sampling, max_new_tokens=len(token_ids))
        result = await self._engine.generate(replace(request, sampling=sampling))
        return replace(result, text=text, token_ids=token_ids, logprobs=(0.0,) * len(token_ids), policy_versions=())


@dataclass(frozen=True, kw_only=True)
class Round:
    episodes: tuple[Episode, ...]
    wall_s: float
    server_s: Mapping[str, float]
    """Sum over all episodes, by part."""
    cpu_s: Mapping[str, float]
    """Core-seconds of all episodes, by program."""


def run_episode_parts(console: Console, *, rounds: int) -> list[dict[str, Any]]:
    """Print the parts of an episode's wall and CPU time; returns the figures."""
    recipe = load_recipe(RECIPE, settings=["model.copying_updates=0"])
    with tempfile.TemporaryDirectory(prefix="bench-episodes-") as scratch:
        state = StateDir(Path(scratch))
        job = StageJob(recipe=recipe, state_root=state.root, stage=Stage.BASE, checkpoint_id=BASE, data_digest="bench")
        make_base.main(job, lambda message: None)
        with embedded_env_server(_server_spec(recipe, state)) as servers:
            measured = asyncio.run(_measure(recipe, state, servers, rounds))
    return [_print_wall(console, measured), _print_cpu(console, measured), _print_rate(console, recipe, measured)]


def _server_spec(recipe: Recipe, state: StateDir) -> ServerSpec:
    desktop = recipe.desktop
    return ServerSpec(
        state=state,
        num_replicas=desktop.num_replicas,
        screen_width=desktop.screen_width,
        screen_height=desktop.screen_height,
    )


async def _measure(recipe: Recipe, state: StateDir, servers: EnvServers, rounds: int) -> list[Round]:
    folder = state.checkpoints / BASE
    async with rollout_session(
        recipe=recipe, state=state, servers=servers, purpose="bench", folder=folder, processor=load_processor(folder)
    ) as session:
        await _round(recipe, session, servers, "warm-up")
        return [await _round(recipe, session, servers, str(number)) for number in range(rounds)]


async def _round(recipe: Recipe, session: RolloutSession, servers: EnvServers, name: str) -> Round:
    """The same tasks each time."""
    items = recipe_suite(recipe).heldout[:NUM_EPISODES]
    planned = {f"bench-{name}-{item.task.task_id}": item for item in items}
    scripts = {episode_id: list(_script(item, recipe, session)) for episode_id, item in planned.items()}
    tools = replace(session.tools, engine=ScriptedEngine(session.tools.engine, scripts))
    run_one = episode_runner(tools, episode_settings(recipe, max_turns=recipe.evaluation.max_turns))
    before = await _server_times(servers)
    with CpuClock() as clock:
        start = time.perf_counter()
        episodes = await gather_episodes(
            [_planned(episode_id, item.task, recipe) for episode_id, item in planned.items()],
            in_turn(run_one, recipe.desktop.num_replicas),
        )
        wall_s = time.perf_counter() - start
    after = await _server_times(servers)
    return Round(
        episodes=episodes,
        wall_s=wall_s,
        server_s={part: after[part] - before[part] for part in SERVER_PARTS},
        cpu_s=clock.seconds,
    )


def _planned(episode_id: str, task: Task, recipe: Recipe) -> tuple[Task, EpisodePlan]:
    plan = EpisodePlan(
        episode_id=episode_id,
        purpose=EpisodePurpose.EVALUATE,
        checkpoint_id=BASE,
        sampling=sampling_params(recipe, temperature=recipe.evaluation.temperature, seed=0),
    )
    return task, plan


def _script(item: SuiteTask, recipe: Recipe, session: RolloutSession) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The responses of a policy that solves the task, turn by turn."""
    assert session.renderer is not None, "the demo's engine uses tokens"
    dialect = load_dialect(recipe.agent.dialect, recipe.agent.coordinate_space)
    screen = (recipe.desktop.screen_width, recipe.desktop.screen_height)
    image = fit_size(*screen, recipe.agent.max_pixels)
    move = partial(from_screen, space=dialect.coordinate_space, image=image, screen=screen)
    for step in item.oracle:
        text = dialect.format(step.description, move_points(step.arguments, move))
        yield text, (*session.renderer.encode(text), session.renderer.im_end_id)


async def _server_times(servers: EnvServers) -> dict[str, float]:
    """Seconds since the server's start, by part."""
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {servers.token}"}) as client:
        answer = (await client.get(f"{servers.urls[0]}/metrics")).raise_for_status()
    samples = [sample for family in text_string_to_metric_families(answer.text) for sample in family.samples]
    return {
        part: sum(one.value for one in samples if one.name == f"{metric}_sum" and one.labels.items() >= labels.items())
        for part, (metric, labels) in SERVER_PARTS.items()
    }


def _print_wall(console: Console, measured: Sequence[Round]) -> dict[str, Any]:
    """The parts are disjoint and add up to the episode."""

    def of_episode(name: str) -> list[float]:
        return [_mean(episode.times_s[name] for episode in one.episodes) for one in measured]

    parts = {part: [one.server_s[part] / len(one.episodes) for one in measured] for part in SERVER_PARTS}
    queued, set_up, *stepped, graded = parts.values()
    rest = {
        "rest of the reset": _less(of_episode("reset"), queued, set_up),
        "rest of the steps": _less(of_episode("step"), *stepped),
        "rest of the grading": _less(of_episode("evaluate"), graded),
        "model": of_episode("model"),
    }
    total = of_episode("total")
    rest["this program, the rest"] = _less(total, *parts.values(), *rest.values())
    return _print_parts(console, "Wall time of an episode", {**parts, **rest}, total)


def _print_cpu(console: Console, measured: Sequence[Round]) -> dict[str, Any]:
    names = {name for one in measured for name in one.cpu_s}
    parts = {name: [one.cpu_s.get(name, 0.0) / len(one.episodes) for one in measured] for name in names}
    total = [sum(values) for values in zip(*parts.values(), strict=True)]
    ordered = dict(sorted(parts.items(), key=lambda part: -_mean(part[1])))
    return _print_parts(console, "CPU time of an episode, core-seconds", ordered, total)


def _print_parts(
    console: Console, title: str, parts: Mapping[str, Sequence[float]], total: Sequence[float]
) -> dict[str, Any]:
    spreads = {name: Spread.of(values) for name, values in {**parts, "together": total}.items()}
    whole = spreads["together"].median
    rows = [[name, spread.range_text(3), f"{spread.median / whole:.0%}"] for name, spread in spreads.items()]
    print_table(console, title, ("part", "s", "share"), rows)
    return {"bench": "episode", "title": title, "parts": {name: spread.fields() for name, spread in spreads.items()}}


def _print_rate(console: Console, recipe: Recipe, measured: Sequence[Round]) -> dict[str, Any]:
    rate = Spread.of(len(one.episodes) / one.wall_s for one in measured)
    solved = sum(episode.outcome is Outcome.SUCCESS for one in measured for episode in one.episodes)
    num_episodes = sum(len(one.episodes) for one in measured)
    console.print(
        f"episodes a second, {recipe.desktop.num_replicas} desktops: {rate.range_text(2)}; bar {EPISODES_PER_S:g} on "
        f"two cores: {verdict(rate.median >= EPISODES_PER_S)}; solved by their scripts: {solved} of {num_episodes}"
    )
    return {"bench": "episode", "title": "episodes a second", "rate": rate.fields(), "solved": solved / num_episodes}


def _mean(values: Any) -> float:
    found = list(values)
    return sum(found) / len(found)


def _less(whole: Sequence[float], *parts: Sequence[float]) -> list[float]:
    return [value - sum(taken) for value, *taken in zip(whole, *parts, strict=True)]
