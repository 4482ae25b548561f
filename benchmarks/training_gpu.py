"""One GPU on the published 4B architecture with random weights: tokens per second, model FLOP utilisation, memory, and
the largest context that fits. Updates are our trainer's own, screenshots included."""

import io
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from rich.console import Console
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from benchmarks.processes import BenchmarkError
from benchmarks.spread import Spread, print_table
from osworld_pipeline.agent.model_inputs import PixelCache
from osworld_pipeline.agent.processor import load_processor
from osworld_pipeline.domain.trajectory import Trajectory
from osworld_pipeline.recipes.schema import GspoSharedSection, TinyModelSection, TrainerSection
from osworld_pipeline.training.model import MatmulPatchEmbed
from osworld_pipeline.training.tiny_model import SPECIAL_TOKENS, build_tiny_checkpoint
from osworld_pipeline.training.update import GspoTrainer

CONTEXT = 8192
"""Tokens of an episode, as spec'd for the 4B recipe."""
NUM_EPISODES = 4
RESPONSE_TOKENS = 100
"""Of a turn."""
PEAK_TFLOPS = {"H100": 989.4, "H200": 989.4, "B200": 2250.0, "A100": 312.0, "L40S": 362.0, "L4": 121.0, "A10": 125.0}
"""Dense bfloat16, of the SXM part where there are several (makers' data sheets)."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The sizes of a Qwen3-VL."""

    vocab_size: int = 151_936
    hidden_size: int = 2560
    intermediate_size: int = 9728
    num_layers: int = 36
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    mrope_section: tuple[int, int, int] = (24, 20, 20)
    max_positions: int = 262_144
    vision_depth: int = 24
    vision_hidden_size: int = 1024
    vision_intermediate_size: int = 4096
    vision_heads: int = 16
    deepstack_layers: tuple[int, ...] = (5, 11, 17)

    def config(self, special_ids: dict[str, int]) -> Qwen3VLConfig:
        """`special_ids`: of the tokenizer that makes the placeholders."""
        return Qwen3VLConfig(
            text_config={
                "vocab_size": self.vocab_size,
                "hidden_size": self.hidden_size,
                "intermediate_size": self.intermediate_size,
                "num_hidden_layers": self.num_layers,
                "num_attention_heads": self.num_heads,
                "num_key_value_heads": self.num_kv_heads,
                "head_dim": self.head_dim,
                "rms_norm_eps": 1e-6,
                "max_position_embeddings": self.max_positions,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 5_000_000.0,
                    "mrope_section": list(self.mrope_section),
                    "mrope_interleaved": True,
                },
                "tie_word_embeddings": True,
            },
            vision_config={
                "depth": self.vision_depth,
                "hidden_size": self.vision_hidden_size,
                "intermediate_size": self.vision_intermediate_size,
                "num_heads": self.vision_heads,
                "patch_size": 16,
                "spatial_merge_size": 2,
                "temporal_patch_size": 2,
                "out_hidden_size": self.hidden_size,
                "num_position_embeddings": 2304,
                "deepstack_visual_indexes": list(self.deepstack_layers),
            },
            image_token_id=special_ids["<|image_pad|>"],
            video_token_id=special_ids["<|video_pad|>"],
            vision_start_token_id=special_ids["<|vision_start|>"],
            vision_end_token_id=special_ids["<|vision_end|>"],
            tie_word_embeddings=True,
        )

    def update_flops(self, trajectories: list[Trajectory], num_patches: int) -> float:
        """Of one update with one epoch and no reference: a forward pass to score, and a forward and a backward pass to
        train (twice a forward's). What is computed again to save memory does not count, so this is MFU's numerator.
        Attention is causal, so half of it; logits are made at response tokens only; the vision tower is frozen, so it
        runs forward alone, in both passes."""
        attention_width = self.num_heads * self.head_dim
        per_token = self.num_layers * (
            2 * self.hidden_size * attention_width
            + 2 * self.hidden_size * self.num_kv_heads * self.head_dim
            + 3 * self.hidden_size * self.intermediate_size
        )
        forward = 0.0
        for trajectory in trajectories:
            length, num_responses = len(trajectory.token_ids), sum(trajectory.response_mask)
            forward += 2.0 * per_token * length
            forward += 2.0 * self.num_layers * attention_width * length**2
            forward += 2.0 * self.hidden_size * self.vocab_size * num_responses
        vision_per_patch = self.vision_depth * (
            4 * self.vision_hidden_size**2 + 2 * self.vision_hidden_size * self.vision_intermediate_size
        )
        return 4.0 * forward + 2 * 2.0 * vision_per_patch * num_patches


FOUR_B = Architecture()


def run_gpu(console: Console, *, num_updates: int, peak_tflops: float | None) -> list[dict[str, Any]]:
    """Prints one line where there is no CUDA device. Raises BenchmarkError."""
    if not torch.cuda.is_available():
        console.print("The 4B architecture is not measured: this machine has no CUDA device.")
        return []
    name = torch.cuda.get_device_name()
    known = next((value for part, value in PEAK_TFLOPS.items() if part in name.replace("-", " ").split()), None)
    peak = peak_tflops or known
    with tempfile.TemporaryDirectory(prefix="bench-training-") as folder:
        bench = Bench(Path(folder), FOUR_B, device="cuda", dtype=torch.bfloat16)
        times, flops, num_tokens = bench.time_updates(num_updates, context=CONTEXT, screen=(1280, 720))
        peak_gb = torch.cuda.max_memory_allocated() / 1e9
        largest = bench.largest_context(screen=(1280, 720), limit=FOUR_B.max_positions)
    speed = Spread.of(num_tokens / seconds for seconds in times)
    tflops = Spread.of(flops / seconds / 1e12 for seconds in times)
    rows = [
        ("tokens per second", speed.range_text(0)),
        ("model TFLOP/s", tflops.range_text(1)),
        ("MFU, %", Spread.of(100 * value / peak for value in tflops.values).range_text(1) if peak else "peak unknown"),
        ("memory, GB", f"{peak_gb:.1f}"),
        ("largest context, tokens", str(largest)),
    ]
    title = (
        f"{name}: Qwen3-VL-4B's architecture, random weights, bfloat16 with float32 masters, activations computed "
        f"again; {NUM_EPISODES} episodes of {CONTEXT} tokens an update, scoring included, vision tower frozen"
    )
    print_table(console, title, ("figure", "value"), rows)
    return [
        {
            "bench": "gpu",
            "device": name,
            "tokens_per_s": speed.fields(),
            "tflops": tflops.fields(),
            "peak_tflops": peak,
            "memory_gb": round(peak_gb, 2),
            "largest_context": largest,
        }
    ]


class Bench:
    """A model of an architecture with random weights under our trainer, and episodes of screenshots for it."""

    def __init__(self, folder: Path, architecture: Architecture, *, device: str, dtype: torch.dtype) -> None:
        self._architecture = architecture
        self._device = device
        # A tiny checkpoint's processor: the published one has the same patches and merges, and ids are ids.
        tiny = TinyModelSection(kind="tiny", vocab_size=400)
        build_tiny_checkpoint(folder / "tiny", tiny, ["You operate a computer.", "Action: click 12 34"])
        self._processor = load_processor(folder / "tiny")
        ids = {token: self._processor.tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}
        torch.manual_seed(0)
        model_class: Any = Qwen3VLForConditionalGeneration
        with torch.device(device):
            model = model_class._from_config(architecture.config(ids), dtype=dtype, attn_implementation="sdpa")
        model.model.visual.patch_embed = MatmulPatchEmbed(model.model.visual.patch_embed)
        model.model.visual.requires_grad_(False)
        model.activation_checkpointing_enable()
        self._cache = PixelCache()
        self._trainer = GspoTrainer(
            model.eval(),
            self._processor,
            # One sequence a pass: at these lengths it fills the device.
            GspoSharedSection(kl_coef=0.0, minibatches_per_update=1, micro_batch_size=1),
            section=TrainerSection(max_tokens_per_batch=architecture.max_positions),
            cache=self._cache,
        )

    def time_updates(
        self, num_updates: int, *, context: int, screen: tuple[int, int]
    ) -> tuple[list[float], float, int]:
        """Seconds of each update after one to warm up, its model FLOP, and its tokens."""
        trajectories = [self._episode(index, context, screen) for index in range(NUM_EPISODES)]
        num_patches = sum(self._num_patches(trajectory) for trajectory in trajectories)
        times = []
        for _ in range(num_updates + 1):
            with self._synchronised():
                started = time.perf_counter()
                self._trainer.update(trajectories)
            times.append(time.perf_counter() - started)
        flops = self._architecture.update_flops(trajectories, num_patches)
        return times[1:], flops, sum(len(trajectory.token_ids) for trajectory in trajectories)

    def largest_context(self, *, screen: tuple[int, int], limit: int, step: int = 1024) -> int:
        """Of one episode in an update, to within `step` tokens; the optimiser's state is held meanwhile."""
        fits, fails = 0, limit + step
        size = min(CONTEXT, limit)
        while fails - fits > step:
            if self._fits(size, screen):
                fits = size
                size = min(2 * size, limit) if fails > limit else (fits + fails) // 2
                if fits == limit:
                    break
            else:
                fails = size
                size = (fits + fails) // 2
        return fits

    def _fits(self, context: int, screen: tuple[int, int]) -> bool:
        try:
            with self._synchronised():
                self._trainer.update([self._episode(0, context, screen)])
        except torch.OutOfMemoryError:
            return False
        finally:
            if self._device == "cuda":
                torch.cuda.empty_cache()
        return True

    def _episode(self, seed: int, context: int, screen: tuple[int, int]) -> Trajectory:
        """Turns of one screenshot and one response, filled up with text to exactly `context` tokens."""
        rng = random.Random(seed)
        tokenizer = self._processor.tokenizer
        special = {tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}
        words = [token_id for token_id in range(len(tokenizer)) if token_id not in special]
        _, grid = self._cache.pixel_values(self._processor, _screenshot(seed, 0, screen))
        placeholders = [self._processor.image_token_id] * (int(grid.prod()) // 4)
        start, end = (tokenizer.convert_tokens_to_ids(f"<|vision_{side}|>") for side in ("start", "end"))
        ids, mask, images = rng.choices(words, k=16), [0] * 16, []
        turn = len(placeholders) + 2 + RESPONSE_TOKENS
        while len(ids) + turn <= context - RESPONSE_TOKENS:
            ids += [start, *placeholders, end, *rng.choices(words, k=RESPONSE_TOKENS)]
            mask += [0] * (len(placeholders) + 2) + [1] * RESPONSE_TOKENS
            images.append(_screenshot(seed, len(images), screen))
        rest = context - len(ids)
        if rest < 1:
            raise BenchmarkError(f"a context of {context} tokens is too short")
        return Trajectory(
            trajectory_id=f"e{seed}",
            task_id="t",
            token_ids=tuple(ids + rng.choices(words, k=rest)),
            response_mask=tuple(mask + [0] * (rest - 1) + [1]),
            images=tuple(images),
            advantage=1.0 if seed % 2 == 0 else -1.0,
        )

    def _num_patches(self, trajectory: Trajectory) -> int:
        return sum(int(self._cache.pixel_values(self._processor, image)[1].prod()) for image in trajectory.images)

    @contextmanager
    def _synchronised(self) -> Iterator[None]:
        """So that the clock stops when the device is done, not when it has been told what to do."""
        if self._device == "cuda":
            torch.cuda.synchronize()
        yield
        if self._device == "cuda":
            torch.cuda.synchronize()


def _screenshot(seed: int, turn: int, size: tuple[int, int]) -> bytes:
    """Each one of its own, because the same picture is encoded only once a pass."""
    buffer = io.BytesIO()
    Image.new("RGB", size, (seed, turn % 256, turn // 256)).save(buffer, format="PNG")
    return buffer.getvalue()
