"""Rollouts over HTTP on real desktops: a scripted policy solves real tasks, and a tiny model's episodes hold exactly
what a trainer recomputes."""

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from env_server_process import RunningServer, running_env_server
from group_runs import run_groups

from osworld_pipeline.agent.model_inputs import build_model_inputs
from osworld_pipeline.agent.processor import load_processor
from osworld_pipeline.agent.renderer import Renderer
from osworld_pipeline.dialects import load_dialect
from osworld_pipeline.domain.episode import EpisodePurpose, Outcome, SamplingParams
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.domain.task import Task
from osworld_pipeline.evaluation.suites import SuiteTask, build_suite
from osworld_pipeline.protocols import GenerateRequest, GenerateResult
from osworld_pipeline.recipes import load_recipe
from osworld_pipeline.recipes.schema import AgentSection, DesktopSection, RewardSection
from osworld_pipeline.rollout.engines.transformers import TransformersEngine
from osworld_pipeline.rollout.env_client import EnvClient
from osworld_pipeline.rollout.run_episode import EpisodeSettings, EpisodeTools
from osworld_pipeline.rollout.run_group import GroupPlan
from osworld_pipeline.rollout.trajectories import episode_trajectories
from osworld_pipeline.runs.checkpoints.ids import recipe_suite
from osworld_pipeline.runs.rollouts.embedded_server import EnvServers
from osworld_pipeline.runs.rollouts.env_servers import open_env_client
from osworld_pipeline.store.trajectories import TrajectoryStore
from osworld_pipeline.wire import EnvConfig

pytestmark = [pytest.mark.desktop, pytest.mark.slow]

SCREEN = (512, 320)
DIALECT = load_dialect("slime")
SETTINGS = EpisodeSettings(
    agent=AgentSection(max_response_tokens=32, max_context_tokens=2048, max_pixels=163_840, system_prompt="short"),
    desktop=DesktopSection(num_replicas=2, screen_width=512, screen_height=320, pause_s=0.3, require_a11y_tree=False),
    reward=RewardSection(),
    max_turns=3,
    episode_timeout_s=60,
    turn_timeout_s=30,
)
PLAN = GroupPlan(
    stage_key="test",
    update=0,
    group_size=2,
    checkpoint_id="c",
    sampling=SamplingParams(temperature=1.0, max_new_tokens=32, seed=1),
    purpose=EpisodePurpose.TRAIN,
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("server")
    with running_env_server(folder, "--screen-size", f"{SCREEN[0]}x{SCREEN[1]}", num_replicas=2) as running:
        yield running


@pytest.fixture
async def client(server: RunningServer) -> AsyncIterator[EnvClient]:
    config = EnvConfig(screen_size=SCREEN, require_a11y_tree=False)
    async with EnvClient(server.url, env_config=config, client_id="test") as client:
        yield client


class OraclePolicy:
    """Recognizes each task by its instruction and answers with its oracle's steps, one per turn."""

    name = "oracle"
    uses_chat_api = False
    policy_version = 0

    def __init__(self, renderer: Renderer, tasks: list[SuiteTask]) -> None:
        self._renderer = renderer
        self._tasks = tasks

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        prompt = self._renderer.tokenizer.decode(request.token_ids)
        (task,) = [task for task in self._tasks if f"[Task]\n{task.task.instruction}<" in prompt]
        step = task.oracle[len(request.images) - 1]
        text = DIALECT.format(step.description, step.arguments)
        ids = tuple(self._renderer.encode(text))
        return GenerateResult(
            token_ids=ids, logprobs=(0.0,) * len(ids), text=text, policy_version=0, finish_reason="stop"
        )

    async def load_weights(self, path: Path, *, policy_version: int) -> None: ...

    async def forget(self, episode_id: str) -> None: ...

    async def health(self) -> None: ...

    async def close(self) -> None: ...


def suite_tasks(*families: str) -> list[SuiteTask]:
    suite = build_suite(seed=0, families=families, num_train=1, num_heldout=1, screen=SCREEN)
    return list(suite.train)


async def test_a_policy_with_the_tasks_oracles_succeeds_in_every_episode(
    client: EnvClient, tiny_folder: Path, tmp_path: Path
) -> None:
    tasks = suite_tasks("rename_folder", "click_button")
    renderer = Renderer(load_processor(tiny_folder))
    store = TrajectoryStore(StateDir(tmp_path))
    tools = EpisodeTools(
        desktop_factory=client.desktop, engine=OraclePolicy(renderer, tasks), renderer=renderer, sink=store
    )
    settings = replace(SETTINGS, max_turns=max(len(task.oracle) for task in tasks))
    groups = await run_groups([task.task for task in tasks], PLAN, tools=tools, settings=settings)
    episodes = [episode for group in groups for episode in group.episodes]
    assert [(episode.outcome, episode.error) for episode in episodes] == [(Outcome.SUCCESS, None)] * 4
    for episode in episodes:
        assert episode.provider == "local"
        assert episode.image_digest
        assert episode.grader_version
        # A line typed into a terminal is below the threshold of a changed screen, but the difference is not zero.
        assert any(step.signals.screen_diff > 0 for step in episode.steps)
    store.write_episodes("part", episodes)
    assert store.read_episodes("part") == tuple(episodes)


async def test_an_episode_of_a_tiny_model_holds_the_tokens_and_logprobs_a_trainer_recomputes(
    client: EnvClient, tiny_folder: Path, tmp_path: Path
) -> None:
    from osworld_pipeline.training.model import load_model

    (task,) = suite_tasks("rename_folder")
    processor = load_processor(tiny_folder)
    model: Any = load_model(tiny_folder)
    store = TrajectoryStore(StateDir(tmp_path))
    engine = TransformersEngine(model, processor, timeout_s=30)
    tools = EpisodeTools(desktop_factory=client.desktop, engine=engine, renderer=Renderer(processor), sink=store)
    (group,) = await run_groups([task.task], PLAN, tools=tools, settings=SETTINGS)
    await engine.close()
    assert len(group.valid_episodes) == 2
    assert group.episodes[0].sequences != group.episodes[1].sequences
    for episode in group.episodes:
        assert len(episode.steps) == 3
        assert episode.reward is not None
        (trajectory,) = episode_trajectories(episode, store.read_blob)
        inputs = build_model_inputs(processor, [(trajectory.token_ids, trajectory.images)])
        with torch.no_grad():
            logits_TV = model(**{name: torch.from_numpy(array) for name, array in inputs.items()}).logits[0]
        logits_TV[:, list(Renderer(processor).banned_ids(logits_TV.shape[-1]))] = -torch.inf
        logprobs_TV = torch.log_softmax(logits_TV.float() / PLAN.sampling.temperature, dim=-1)
        ids_T = torch.tensor(trajectory.token_ids)
        mask_T = torch.tensor(trajectory.response_mask, dtype=torch.bool)
        recomputed_T = torch.zeros(len(ids_T))
        recomputed_T[1:] = logprobs_TV[:-1].gather(1, ids_T[1:, None])[:, 0]
        difference = (recomputed_T - torch.tensor(trajectory.sampled_logprobs))[mask_T].abs().max()
        assert mask_T.sum() > 3
        assert difference < 1e-4


async def test_a_rerun_has_the_same_episode_ids_and_giving_up_an_impossible_task_succeeds(
    client: EnvClient, tiny_folder: Path, tmp_path: Path
) -> None:
    infeasible = Task.from_config(
        {"id": "no-way", "instruction": "Do the impossible.", "config": [], "evaluator": {"func": "infeasible"}}
    )
    renderer = Renderer(load_processor(tiny_folder))

    class GivesUp(OraclePolicy):
        async def generate(self, request: GenerateRequest) -> GenerateResult:
            text = DIALECT.format("Give up", {"action": "terminate", "status": "failure"})
            ids = tuple(self._renderer.encode(text))
            return GenerateResult(
                token_ids=ids, logprobs=(0.0,) * len(ids), text=text, policy_version=0, finish_reason="stop"
            )

    tools = EpisodeTools(
        desktop_factory=client.desktop,
        engine=GivesUp(renderer, []),
        renderer=renderer,
        sink=TrajectoryStore(StateDir(tmp_path)),
    )
    runs = [await run_groups([infeasible], PLAN, tools=tools, settings=SETTINGS) for _ in range(2)]
    ids = [[episode.episode_id for group in groups for episode in group.episodes] for groups in runs]
    assert ids[0] == ids[1] == ["test-u0000-g00-s00", "test-u0000-g00-s01"]
    assert all(episode.is_success for groups in runs for group in groups for episode in group.episodes)


KILLED = """
import asyncio, sys
from pathlib import Path
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.recipes import load_recipe
from osworld_pipeline.runs.rollouts.embedded_server import EnvServers
from osworld_pipeline.runs.rollouts.env_servers import open_env_client
from osworld_pipeline.runs.checkpoints.ids import recipe_suite

async def main(root, url):
    recipe, servers = load_recipe("smoke"), EnvServers(urls=(url,), token=None, num_replicas=2)
    async with open_env_client(recipe, StateDir(Path(root)), servers, purpose="gspo_phase1-1") as client:
        task = recipe_suite(recipe).train[0].task
        await asyncio.gather(*[client.desktop().reset(task) for _ in range(2)])
        print("all taken", flush=True)
        await asyncio.sleep(60)

asyncio.run(main(*sys.argv[1:]))
"""


def take_all_desktops_and_die(root: Path, url: str) -> None:
    with subprocess.Popen([sys.executable, "-c", KILLED, str(root), url], stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == b"all taken\n"
        program.kill()


async def test_desktops_of_a_killed_program_are_given_back_when_it_is_started_again(
    server: RunningServer, tmp_path: Path
) -> None:
    await asyncio.to_thread(take_all_desktops_and_die, tmp_path, server.url)
    recipe, servers = load_recipe("smoke"), EnvServers(urls=(server.url,), token=None, num_replicas=2)
    begun = time.monotonic()
    async with open_env_client(recipe, StateDir(tmp_path), servers, purpose="gspo_phase1-1") as client:
        desktop = client.desktop()
        await desktop.reset(recipe_suite(recipe).train[0].task)
        await desktop.close()
    assert time.monotonic() - begun < 30, "it waited until they had been idle for long enough"
