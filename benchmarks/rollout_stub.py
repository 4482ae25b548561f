"""Stubs for rollouts: episodes that only wait for realistic random times, a trainer with a fixed time, and
desktops with real screenshots."""

import asyncio
import io
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw

from osworld_pipeline.agent.renderer import Renderer
from osworld_pipeline.domain.episode import (
    Episode,
    EpisodePurpose,
    Outcome,
    Reward,
    SamplingParams,
    Step,
    StepSignals,
)
from osworld_pipeline.domain.group import RolloutGroup
from osworld_pipeline.domain.observation import Observation
from osworld_pipeline.domain.task import Task
from osworld_pipeline.domain.trajectory import Trajectory
from osworld_pipeline.protocols import DesktopInfo, GenerateRequest, GenerateResult
from osworld_pipeline.recipes.schema import AgentSection, DesktopSection, RewardSection, TinyModelSection
from osworld_pipeline.rollout.batch import GspoBatch
from osworld_pipeline.rollout.run_episode import EpisodePlan, EpisodeSettings


@dataclass(frozen=True, kw_only=True)
class Latencies:
    """Seconds, before `scale`. Lognormal times have a median and a sigma; a share of steps hangs."""

    reset_median_s: float = 8.0
    reset_sigma: float = 0.6
    step_median_s: float = 2.0
    step_sigma: float = 0.6
    model_median_s: float = 2.5
    model_sigma: float = 0.5
    hang_share: float = 0.01
    hang_s: float = 45.0
    score_s: float = 2.0
    num_turns: tuple[int, int] = (4, 30)
    """Fewest and most; their logarithm is uniform."""
    train_s: float = 75.0
    scale: float = 0.01
    """Factor of all times, so that a benchmark takes seconds."""

    def describe(self) -> str:
        return (
            f"reset lognormal({self.reset_median_s:g} s, {self.reset_sigma:g}), "
            f"step lognormal({self.step_median_s:g} s, {self.step_sigma:g}) and {self.hang_share:.0%} hang "
            f"{self.hang_s:g} s more, model lognormal({self.model_median_s:g} s, {self.model_sigma:g}), "
            f"{self.num_turns[0]} to {self.num_turns[1]} turns log-uniform, update {self.train_s:g} s; "
            f"all times {self.scale:g} of that"
        )

    def reset(self, rng: random.Random) -> float:
        return self._lognormal(rng, self.reset_median_s, self.reset_sigma)

    def step(self, rng: random.Random) -> float:
        hang_s = self.hang_s if rng.random() < self.hang_share else 0.0
        return self._lognormal(rng, self.step_median_s, self.step_sigma) + hang_s

    def model(self, rng: random.Random) -> float:
        return self._lognormal(rng, self.model_median_s, self.model_sigma)

    def turns(self, rng: random.Random) -> int:
        fewest, most = self.num_turns
        return round(math.exp(rng.uniform(math.log(fewest), math.log(most))))

    @staticmethod
    def _lognormal(rng: random.Random, median_s: float, sigma: float) -> float:
        return rng.lognormvariate(math.log(median_s), sigma)


class StubEpisodes:
    """A RunEpisode that only waits; an episode's times depend only on its seed, so they are the same in every loop."""

    def __init__(self, latencies: Latencies) -> None:
        self.version = 0
        self._latencies = latencies

    async def __call__(self, task: Task, plan: EpisodePlan) -> Episode:
        latencies, rng = self._latencies, random.Random(plan.episode_id)
        waits = [latencies.reset(rng)]
        waits += [latencies.model(rng) + latencies.step(rng) for _ in range(latencies.turns(rng))]
        waits.append(latencies.score_s)
        for wait_s in waits:
            await asyncio.sleep(wait_s * latencies.scale)
        steps = [stub_step(index, self.version) for index in range(len(waits) - 2)]
        reward = float(rng.random() < 0.5)
        return Episode(
            episode_id=plan.episode_id,
            task_id=task.task_id,
            task_digest="stub",
            purpose=EpisodePurpose.TRAIN,
            checkpoint_id="stub",
            engine="stub",
            sampling=plan.sampling,
            outcome=Outcome.SUCCESS if reward else Outcome.FAILURE,
            reward=Reward(task=reward, shaped=reward),
            steps=tuple(steps),
            times_s={"planned": sum(waits) * latencies.scale},
        )


class TrainAll:
    """A batch builder that trains on every group."""

    def __call__(self, groups: Sequence[RolloutGroup], *, update: int) -> GspoBatch:
        """Every group is trained on, with any reward."""
        trajectories = [
            Trajectory(trajectory_id=one.episode_id, task_id=one.task_id, token_ids=(), response_mask=(), images=())
            for group in groups
            for one in group.episodes
        ]
        return GspoBatch(groups=tuple(groups), trajectories=tuple(trajectories))

    def give_back(self, num_injections: int, *, update: int) -> None:
        """There are no replay rows here."""


def stub_step(index: int, version: int) -> Step:
    return Step(
        step_index=index,
        screenshot_sha256="0" * 64,
        screenshot_width=32,
        screenshot_height=32,
        screenshot_format="png",
        screenshot_num_bytes=0,
        observation_text="",
        response_text="",
        action=None,
        command=None,
        signals=StepSignals(action_type="wait", action_parsed=True, action_executed=True),
        policy_version=version,
        prompt_num_tokens=0,
        response_num_tokens=0,
        model_s=0.0,
        step_s=0.0,
    )


def stub_tasks(count: int) -> list[Task]:
    config = {"instruction": "Do nothing.", "evaluator": {"func": "infeasible"}}
    return [Task.from_config({"id": f"stub-{index}", **config}) for index in range(count)]


def stub_settings(num_turns: int) -> EpisodeSettings:
    return EpisodeSettings(
        agent=AgentSection(
            max_turns=num_turns, max_response_tokens=64, max_context_tokens=100_000, system_prompt="short"
        ),
        desktop=DesktopSection(pause_s=0.0, require_a11y_tree=False),
        reward=RewardSection(),
        max_turns=num_turns,
    )


def stub_renderer(folder: Path) -> Renderer:
    """The renderer of a tiny model, whose files are written to `folder`."""
    from osworld_pipeline.agent.processor import load_processor
    from osworld_pipeline.training.tiny.model import build_tiny_checkpoint

    spec = TinyModelSection(
        kind="tiny", hidden_size=64, num_layers=2, vision_hidden_size=48, vision_depth=1, vocab_size=512
    )
    build_tiny_checkpoint(folder, spec, ["Action: wait for the screen\n[Task]\nDo nothing."])
    return Renderer(load_processor(folder))


STUB_SAMPLING = SamplingParams(temperature=1.0, max_new_tokens=64)


def draw_screens(width: int, height: int, count: int) -> list[bytes]:
    """Different screens filled with windows and words, as PNG."""
    screens: list[bytes] = []
    for seed in range(count):
        rng = random.Random(seed)
        image = Image.new("RGB", (width, height), (236, 239, 244))
        draw = ImageDraw.Draw(image)
        for _ in range(25):
            x, y = rng.randrange(width), rng.randrange(height)
            box = (x, y, x + rng.randrange(40, 400), y + rng.randrange(20, 250))
            draw.rectangle(box, fill=tuple(rng.randrange(120, 256) for _ in range(3)), outline=(60, 60, 60))
        for _ in range(250):
            words = " ".join(rng.choice(("file", "edit", "view", "terminal", "report", "2024")) for _ in range(6))
            draw.text((rng.randrange(width), rng.randrange(height)), words, fill=(20, 20, 20))
        buffer = io.BytesIO()
        image.save(buffer, format="PNG", compress_level=1)
        screens.append(buffer.getvalue())
    return screens


class TimedDesktop:
    """Returns the next of its screens at once."""

    def __init__(self, screens: Sequence[bytes], *, screen_size: tuple[int, int] | None = None) -> None:
        """`screen_size`: the (width, height) that the screens were resized from."""
        self._screens = screens
        self._screen_size = screen_size
        self._num_shown = 0

    async def reset(self, task: Task, *, record_id: str = "") -> tuple[Observation, DesktopInfo]:
        info = DesktopInfo(replica_id="stub", provider="stub", image_digest="stub", grader_version="stub")
        return self._observe(), info

    async def act(self, command: str, *, pause_s: float, note: str = "") -> Observation:
        await asyncio.sleep(0)
        return self._observe()

    async def score(self) -> float:
        return 0.0

    async def close(self) -> None: ...

    def _observe(self) -> Observation:
        self._num_shown += 1
        screenshot = self._screens[self._num_shown % len(self._screens)]
        return Observation(screenshot=screenshot, screen_size=self._screen_size)


class TimedEngine:
    """Returns the same text after a fixed time."""

    name = "stub"
    uses_chat_api = False
    policy_version = 0

    def __init__(self, text: str, token_ids: Sequence[int], *, latency_s: float) -> None:
        self._text = text
        self._token_ids = tuple(token_ids)
        self._latency_s = latency_s

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        await asyncio.sleep(self._latency_s)
        return GenerateResult(
            text=self._text,
            policy_version=0,
            finish_reason="stop",
            token_ids=self._token_ids,
            logprobs=(-1.0,) * len(self._token_ids),
        )

    async def load_weights(self, path: Path, *, policy_version: int) -> None: ...

    async def forget(self, episode_id: str) -> None: ...

    async def health(self) -> None: ...

    async def close(self) -> None: ...
