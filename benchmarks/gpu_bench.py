"""Shared code of the parts of the GPU measurement: a model with a trainer, an engine on the same weights, clocks that
wait for the device, and its memory."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_size import Size, device
from benchmarks.real_shape import UpdateKind, build_model, has_fast_bfloat16
from benchmarks.real_turns import demonstration_of, sampled_episode, screen
from osworld_pipeline.agent.model_inputs import PixelCache
from osworld_pipeline.agent.processor import load_processor
from osworld_pipeline.agent.renderer import Renderer
from osworld_pipeline.domain.trajectory import Trajectory
from osworld_pipeline.protocols import PolicyEngine
from osworld_pipeline.recipes.schema import GspoSharedSection, SftSection, TrainerSection
from osworld_pipeline.rollout.engines.transformers import TransformersEngine
from osworld_pipeline.training.packing import use_packed_attention
from osworld_pipeline.training.sft import SftTrainer
from osworld_pipeline.training.update import GspoTrainer
from osworld_pipeline.training.weights import lora

MAX_LOGPROB_DIFF = 0.5
"""Above this an update is refused. Random weights round worse than trained ones; `exactness` separates rounding from
defects."""
PIXEL_CACHE_BYTES = 8 << 30
ENGINE_TIMEOUT_S = 120.0


class Bench:
    """One model on the device in bfloat16 (in float32 on a CPU that is slow with it), with all weights trained or with
    adapters."""

    def __init__(self, size: Size, processor_folder: Path, *, has_lora: bool = False, is_packed: bool = False) -> None:
        self.size = size
        self.device = device()
        self.processor = load_processor(processor_folder)
        self.renderer = Renderer(self.processor)
        self.cache = PixelCache(max_bytes=PIXEL_CACHE_BYTES)
        self._runner: asyncio.Runner | None = None
        self.has_lora = has_lora
        self.is_packed = is_packed
        dtype = torch.bfloat16 if has_fast_bfloat16(self.device) else torch.float32
        self.model = build_model(size.architecture, device=self.device, dtype=dtype)
        if has_lora:
            lora.add_adapters(self.model, size.lora, seed=0)
        else:
            self.model.model.visual.requires_grad_(False)
        self.model.activation_checkpointing_enable()
        if is_packed:
            use_packed_attention(self.model)

    def section(self, *, max_tokens: int) -> TrainerSection:
        return TrainerSection(
            max_tokens_per_batch=max_tokens,
            batching="packed" if self.is_packed else "padded",
            lora=self.size.lora if self.has_lora else None,
        )

    def open_trainer(self, kind: UpdateKind, *, max_tokens: int, learning_rate: float | None = None) -> Any:
        """A trainer with one sequence a pass for gspo, and as many as fit into `max_tokens` for sft."""
        section = self.section(max_tokens=max_tokens)
        if learning_rate is None:
            learning_rate = 1e-5 if self.has_lora else 1e-6
        if kind.startswith("sft"):
            sft = SftSection(num_updates=100, learning_rate=learning_rate, warmup_updates=0)
            return SftTrainer(self.model, self.processor, sft, section=section, cache=self.cache)
        gspo = GspoSharedSection(
            kl_coef=0.0,
            learning_rate=learning_rate,
            minibatches_per_update=1,
            micro_batch_size=1,
            max_logprob_diff=MAX_LOGPROB_DIFF,
        )
        return GspoTrainer(self.model, self.processor, gspo, section=section, cache=self.cache)

    def sequences(self, context: int, num_sequences: int) -> list[Trajectory]:
        """Sequences of exactly `context` tokens, filled with screens that are all different."""
        return [
            demonstration_of(
                self.renderer, f"s{index}", context, size=self.size.screen, advantage=1.0 - 2.0 * (index % 2)
            )
            for index in range(num_sequences)
        ]

    def sample(self, engine: PolicyEngine, name: str, *, keeps_turns: bool = True) -> list[Trajectory]:
        """Sample concurrent episodes, each with its own screens and seed."""
        assert self._runner is not None, "an engine is used within `engine` or `looped`"
        return self._runner.run(self._sample(engine, name, keeps_turns=keeps_turns))

    async def _sample(self, engine: PolicyEngine, name: str, *, keeps_turns: bool) -> list[Trajectory]:
        episodes = [
            sampled_episode(
                engine,
                self.renderer,
                f"{name}-{index}",
                [screen(100 * index + turn, self.size.screen) for turn in range(self.size.num_turns)],
                max_new_tokens=self.size.max_new_tokens,
                advantage=1.0 - 2.0 * (index % 2),
                keeps_turns=keeps_turns,
            )
            for index in range(self.size.num_episodes)
        ]
        return list(await asyncio.gather(*episodes))

    @contextmanager
    def engine(self, model: Any = None) -> Iterator[TransformersEngine]:
        """An engine on the trainer's own model, as in a run in one process, or on another one."""
        engine = TransformersEngine(
            self.model if model is None else model,
            self.processor,
            device=self.device,
            timeout_s=ENGINE_TIMEOUT_S,
            cache=self.cache,
        )
        with self.looped(engine):
            yield engine

    @contextmanager
    def looped(self, engine: PolicyEngine) -> Iterator[None]:
        """One event loop for all requests of `sample` to the engine, which is closed at the end."""
        with asyncio.Runner() as self._runner:
            try:
                yield
            finally:
                self._runner.run(engine.close())


def synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@contextmanager
def stopwatch() -> Iterator[list[float]]:
    """The list gets the seconds until the device has finished its work, not only until the work is queued."""
    seconds: list[float] = []
    synchronise()
    started = time.perf_counter()
    yield seconds
    synchronise()
    seconds.append(time.perf_counter() - started)


def forget_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_bytes() -> int | None:
    """Peak memory of torch's allocator since `forget_peak`, unused blocks included; None on a CPU."""
    return torch.cuda.max_memory_reserved() if torch.cuda.is_available() else None


def num_tokens(trajectories: Sequence[Trajectory]) -> int:
    return sum(len(trajectory.token_ids) for trajectory in trajectories)


def num_sampled(trajectories: Sequence[Trajectory]) -> int:
    return sum(sum(trajectory.response_mask) for trajectory in trajectories)
