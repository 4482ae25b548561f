"""The trainer trains on exactly what was sampled: for real episodes on real desktops its log-probabilities equal the
sampler's, in either context mode, and every way of showing the trainer something else is detected."""

import asyncio
import io
import math
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from env_server_process import running_env_server
from group_runs import run_groups
from PIL import Image

from osworld_pipeline.agent.model_inputs import build_model_inputs
from osworld_pipeline.agent.observation_text import system_message, user_message
from osworld_pipeline.agent.processor import load_processor
from osworld_pipeline.agent.renderer import Renderer
from osworld_pipeline.dialects import load_dialect
from osworld_pipeline.domain.episode import Episode, SamplingParams
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.domain.trajectory import Trajectory
from osworld_pipeline.errors import TrainingError
from osworld_pipeline.evaluation.suites import build_suite
from osworld_pipeline.protocols import PolicyEngine
from osworld_pipeline.recipes.schema import AgentSection, DesktopSection, EngineSection, RewardSection, TinyModelSection
from osworld_pipeline.rollout.engines.transformers import TransformersEngine
from osworld_pipeline.rollout.env_client import EnvClient
from osworld_pipeline.rollout.run_episode import EpisodeSettings, EpisodeTools
from osworld_pipeline.rollout.run_group import GroupPlan
from osworld_pipeline.rollout.trajectories import episode_trajectories
from osworld_pipeline.runs.parity.exactness import ExactnessReport, compare_logprobs, compare_trajectories
from osworld_pipeline.store.trajectories import TrajectoryStore
from osworld_pipeline.training.model import load_model
from osworld_pipeline.training.tiny.model import build_tiny_checkpoint
from osworld_pipeline.wire import EnvConfig

pytestmark = [pytest.mark.desktop, pytest.mark.slow, pytest.mark.timeout(300)]

SCREEN = (512, 320)
NUM_REPLICAS = 4
MAX_DIFF = 1e-4
FAMILIES = ("rename_folder", "click_button")
# A menu opens where the mouse is pressed, so the screens of an episode differ.
RESPONSE = load_dialect("slime").format("Go", {"action": "right_click", "coordinate": [200, 120]})


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A way of sampling, and the number of episodes to test it with."""

    engine: str = "transformers"
    context_mode: str = "append"
    reuse_kv_cache: bool = True
    num_episodes: int = 16


TRANSFORMERS = {
    "append": Setup(num_episodes=20),
    "append without reuse": Setup(reuse_kv_cache=False, num_episodes=10),
    "window": Setup(context_mode="window", num_episodes=20),
}
SGLANG = {
    "append": Setup(engine="sglang", num_episodes=26),
    "window": Setup(engine="sglang", context_mode="window", num_episodes=24),
}


@dataclass(frozen=True, kw_only=True)
class Recorded:
    episodes: Sequence[Episode]
    read_blob: Callable[[str], bytes]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that has learned one action, so that its episodes do something."""
    folder = tmp_path_factory.mktemp("exactness") / "checkpoint"
    section = TinyModelSection(
        kind="tiny", hidden_size=64, num_layers=2, vision_hidden_size=48, vision_depth=1, vocab_size=512
    )
    build_tiny_checkpoint(folder, section, [RESPONSE] * 4)
    torch.set_num_threads(1)
    model, processor = load_model(folder), load_processor(folder)
    teach(model, processor, num_updates=60)
    model.save_pretrained(folder)
    return folder


def teach(model: Any, processor: Any, *, num_updates: int) -> None:
    """Teaches RESPONSE for the first turn. Later turns are longer than any in training, with arbitrary responses."""
    renderer = Renderer(processor)
    random = np.random.default_rng(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    response = [*renderer.encode(RESPONSE), renderer.im_end_id]
    for _ in range(num_updates):
        sequences = []
        for _ in range(4):
            colours = random.integers(0, 256, (4, 6, 3), dtype=np.uint8)
            text = " ".join(str(number) for number in random.integers(0, 999, random.integers(4, 60)))
            ids = renderer.turn(system_message("You use a computer."))
            ids += [*renderer.turn(user_message(text), [(96, 64)]), *renderer.generation_prompt, *response]
            sequences.append((ids, [png(colours.repeat(16, axis=0).repeat(16, axis=1))]))
        inputs = build_model_inputs(processor, sequences, padding_side="left")
        labels = torch.from_numpy(inputs["input_ids"]).clone()
        labels[:, : -len(response)] = -100
        loss = model(**{name: torch.from_numpy(array) for name, array in inputs.items()}, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def png(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG")
    return buffer.getvalue()


@pytest.fixture(scope="module")
def server_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("server")
    with running_env_server(folder, "--screen-size", f"{SCREEN[0]}x{SCREEN[1]}", num_replicas=NUM_REPLICAS) as running:
        yield running.url


@asynccontextmanager
async def open_engine(setup: Setup, checkpoint: Path, sglang_url: str | None) -> AsyncIterator[PolicyEngine]:
    processor = load_processor(checkpoint)
    if setup.engine == "sglang":
        from osworld_pipeline.rollout.engines.sglang import SglangEngine
        from osworld_pipeline.rollout.engines.sglang_weights import vocab_size_of

        assert sglang_url is not None
        section = EngineSection(kind="sglang", urls=(sglang_url,))
        engine: PolicyEngine = SglangEngine(
            section.urls, renderer=Renderer(processor), section=section, vocab_size=vocab_size_of(checkpoint)
        )
    else:
        engine = TransformersEngine(
            load_model(checkpoint), processor, timeout_s=60, reuse_kv_cache=setup.reuse_kv_cache
        )
    try:
        await engine.health()
        yield engine
    finally:
        await engine.close()


async def record(
    setup: Setup, checkpoint: Path, server_url: str, folder: Path, *, sglang_url: str | None = None
) -> Recorded:
    agent = AgentSection(
        context_mode=setup.context_mode, window_screenshots=2, max_response_tokens=48, max_context_tokens=4096,
        max_pixels=163_840, system_prompt="short",
    )  # fmt: skip
    desktop = DesktopSection(
        num_replicas=NUM_REPLICAS, screen_width=SCREEN[0], screen_height=SCREEN[1], pause_s=0.1, require_a11y_tree=False
    )
    settings = EpisodeSettings(agent=agent, desktop=desktop, reward=RewardSection(), max_turns=3)
    plan = GroupPlan(
        stage_key="exact",
        update=0,
        group_size=setup.num_episodes // len(FAMILIES),
        checkpoint_id="c",
        sampling=SamplingParams(temperature=0.8, max_new_tokens=48, seed=1),
    )
    suite = build_suite(seed=0, families=FAMILIES, num_train=1, num_heldout=1, screen=SCREEN)
    store = TrajectoryStore(StateDir(folder))
    config = EnvConfig(screen_size=SCREEN, require_a11y_tree=False)
    async with (
        open_engine(setup, checkpoint, sglang_url) as engine,
        EnvClient(server_url, env_config=config, client_id="test") as client,
    ):
        renderer = Renderer(load_processor(checkpoint))
        tools = EpisodeTools(desktop_factory=client.desktop, engine=engine, renderer=renderer, sink=store)
        groups = await run_groups([each.task for each in suite.train], plan, tools=tools, settings=settings)
    episodes = [episode for group in groups for episode in group.episodes]
    assert [episode.error for episode in episodes] == [None] * setup.num_episodes
    # From the store, as a trainer gets them.
    store.write_episodes("part", episodes)
    return Recorded(episodes=store.read_episodes("part"), read_blob=store.read_blob)


def check_exact(setup: Setup, recorded: Recorded, checkpoint: Path) -> ExactnessReport:
    assert all(episode.context_mode == setup.context_mode for episode in recorded.episodes)
    report = compare_logprobs(recorded.episodes, recorded.read_blob, load_model(checkpoint), load_processor(checkpoint))
    num_turns = sum(len(episode.steps) for episode in recorded.episodes)
    assert report.num_sequences == (num_turns if setup.context_mode == "window" else setup.num_episodes)
    assert report.num_tokens == sum(step.response_num_tokens for episode in recorded.episodes for step in episode.steps)
    assert num_turns == 3 * setup.num_episodes
    report.require(max_diff=MAX_DIFF)
    print(
        f"{setup.engine}, {setup.context_mode}: {setup.num_episodes} episodes, {report.num_tokens} tokens, "
        f"largest difference {report.max_diff:.2g}, mean {report.mean_diff:.2g}"
    )
    return report


@pytest.fixture(scope="module")
def recorded_once(
    checkpoint: Path, server_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Recorded]:
    """Episodes of TRANSFORMERS by name, recorded when they are first requested."""
    recorded: dict[str, Recorded] = {}

    def get(name: str) -> Recorded:
        if name not in recorded:
            folder = tmp_path_factory.mktemp("store")
            recorded[name] = asyncio.run(record(TRANSFORMERS[name], checkpoint, server_url, folder))
        return recorded[name]

    return get


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_trainer_logprobs_equal_those_of_the_transformers_engine(
    name: str, checkpoint: Path, recorded_once: Callable[[str], Recorded]
) -> None:
    check_exact(TRANSFORMERS[name], recorded_once(name), checkpoint)


@pytest.mark.sglang
@pytest.mark.timeout(1200)
def test_trainer_logprobs_equal_those_of_an_sglang_server(checkpoint: Path, server_url: str, tmp_path: Path) -> None:
    from sglang_server import running_sglang

    with running_sglang(checkpoint) as url:
        for name, setup in SGLANG.items():
            recorded = asyncio.run(record(setup, checkpoint, server_url, tmp_path / name, sglang_url=url))
            check_exact(setup, recorded, checkpoint)


@pytest.fixture
def honest(recorded_once: Callable[[str], Recorded]) -> Sequence[Trajectory]:
    """Four unmodified trajectories. In the last one, the first action changed the screen."""
    recorded = recorded_once("append")
    found = [
        trajectory for episode in recorded.episodes for trajectory in episode_trajectories(episode, recorded.read_blob)
    ]
    moving = next(trajectory for trajectory in found if trajectory.images[0] != trajectory.images[1])
    return [*[trajectory for trajectory in found if trajectory is not moving][:3], moving]


def with_screenshots_swapped(trajectory: Trajectory) -> Trajectory:
    first, second, *others = trajectory.images
    return replace(trajectory, images=(second, first, *others))


def with_a_block_changed(trajectory: Trajectory) -> Trajectory:
    with Image.open(io.BytesIO(trajectory.images[0])) as opened:
        pixels = np.asarray(opened.convert("RGB")).copy()
    pixels[96:128, 160:192] = 255 - pixels[96:128, 160:192]
    return replace(trajectory, images=(png(pixels), *trajectory.images[1:]))


def with_an_image_dropped(trajectory: Trajectory) -> Trajectory:
    return replace(trajectory, images=tuple(trajectory.images)[1:])


def with_a_token_changed(trajectory: Trajectory) -> Trajectory:
    ids = list(trajectory.token_ids)
    ids[trajectory.response_mask.index(1) - 1] += 1
    return replace(trajectory, token_ids=tuple(ids))


def with_a_sampled_token_changed(trajectory: Trajectory) -> Trajectory:
    ids = list(trajectory.token_ids)
    ids[trajectory.response_mask.index(1)] += 1
    return replace(trajectory, token_ids=tuple(ids))


def with_the_mask_shifted(trajectory: Trajectory) -> Trajectory:
    return replace(trajectory, response_mask=(0, *trajectory.response_mask[:-1]))


@pytest.mark.parametrize(
    "tamper",
    [
        with_screenshots_swapped, with_a_block_changed, with_an_image_dropped, with_a_token_changed,
        with_a_sampled_token_changed, with_the_mask_shifted,
    ],
    ids=lambda tamper: tamper.__name__,
)  # fmt: skip
def test_tampering_with_one_trajectory_is_detected(
    tamper: Callable[[Trajectory], Trajectory], honest: Sequence[Trajectory], checkpoint: Path
) -> None:
    model, processor = load_model(checkpoint), load_processor(checkpoint)
    compare_trajectories(honest, model, processor).require(max_diff=MAX_DIFF)
    tampered = [*honest[:-1], tamper(honest[-1])]
    with pytest.raises(TrainingError, match=honest[-1].trajectory_id):
        compare_trajectories(tampered, model, processor).require(max_diff=MAX_DIFF)


def test_a_log_probability_that_is_not_a_number_is_detected(honest: Sequence[Trajectory], checkpoint: Path) -> None:
    broken = [math.nan if mask else 0.0 for mask in honest[0].response_mask]
    report = compare_trajectories(
        [replace(honest[0], sampled_logprobs=tuple(broken)), *honest[1:]],
        load_model(checkpoint),
        load_processor(checkpoint),
    )
    with pytest.raises(TrainingError, match="differs from the sampler's by nan"):
        report.require(max_diff=MAX_DIFF)


def test_a_comparison_without_trajectories_is_an_error(checkpoint: Path) -> None:
    report = compare_trajectories([], load_model(checkpoint), load_processor(checkpoint))
    with pytest.raises(TrainingError, match="no sampled tokens"):
        report.require(max_diff=MAX_DIFF)
