"""The transformers engine: episodes that request their turns concurrently, against transformers' own `generate` on the
same prompts in plain batches, which reads every prompt from its beginning."""

import asyncio
import io
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from rich.console import Console

from benchmarks.spread import Spread, print_table
from osworld_pipeline.agent.model_inputs import PixelCache, build_model_inputs
from osworld_pipeline.agent.observation_text import system_message, user_message
from osworld_pipeline.agent.processor import load_processor
from osworld_pipeline.agent.renderer import Renderer
from osworld_pipeline.domain.episode import SamplingParams
from osworld_pipeline.protocols import GenerateRequest
from osworld_pipeline.recipes.schema import TinyModelSection
from osworld_pipeline.rollout.engines.transformers import TransformersEngine
from osworld_pipeline.training.model import load_model
from osworld_pipeline.training.tiny.model import build_tiny_checkpoint

NUM_EPISODES, NUM_TURNS, NUM_NEW_TOKENS = 8, 4, 48
SCREEN = (512, 320)
TEXT = "The last action changed the screen. Step by step towards the folder's new name. " * 4


@dataclass(kw_only=True)
class Talk:
    """One episode's prompt as it grows; responses all have NUM_NEW_TOKENS tokens."""

    renderer: Renderer
    index: int
    token_ids: list[int] = field(default_factory=list)
    images: list[bytes] = field(default_factory=list)

    def ask(self) -> GenerateRequest:
        if not self.token_ids:
            self.token_ids = self.renderer.turn(system_message("You operate a computer. " * 8))
        self.images.append(_screenshot(100 * self.index + len(self.images)))
        self.token_ids += [*self.renderer.turn(user_message(TEXT), [SCREEN]), *self.renderer.generation_prompt]
        return GenerateRequest(
            token_ids=tuple(self.token_ids),
            images=tuple(self.images),
            sampling=SamplingParams(temperature=0.8, max_new_tokens=NUM_NEW_TOKENS, stop=(), seed=self.index),
            episode_id=f"e{self.index}",
        )

    def add_response(self, token_ids: tuple[int, ...]) -> None:
        self.token_ids += [*token_ids, self.renderer.im_end_id, *self.renderer.newline_ids]


@dataclass(frozen=True, kw_only=True)
class Pass:
    num_tokens: int
    seconds: float
    turns_s: list[float]


def run_engine(console: Console, *, rounds: int) -> list[dict[str, Any]]:
    """`rounds`: how often each way is run, one after the other."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        section = TinyModelSection(kind="tiny")
        build_tiny_checkpoint(folder, section, [TEXT])
        model, processor = load_model(folder), load_processor(folder)
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return _compare(console, model, processor, rounds=rounds)
        finally:
            torch.set_num_threads(num_threads)


def _compare(console: Console, model: Any, processor: Any, *, rounds: int) -> list[dict[str, Any]]:
    ways: dict[str, Callable[[], Pass]] = {
        "transformers' generate, plain batches": lambda: _generate_plainly(model, processor),
        "the engine, nothing kept between turns": lambda: asyncio.run(_run_engine(model, processor, reuse=False)),
        "the engine, keys and values kept": lambda: asyncio.run(_run_engine(model, processor, reuse=True)),
    }
    for way in ways.values():
        way()  # the first run of each includes torch's set-up
    passes: dict[str, list[Pass]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            passes[name].append(way())
    rates = {name: Spread.of(each.num_tokens / each.seconds for each in found) for name, found in passes.items()}
    turns = {name: Spread.of(s * 1e3 for each in found for s in each.turns_s) for name, found in passes.items()}
    baseline = next(iter(rates.values())).median
    rows = [
        (name, rates[name].range_text(0), turns[name].quartile_text(0), f"{rates[name].median / baseline:.2f}x")
        for name in ways
    ]
    title = f"{NUM_EPISODES} episodes of {NUM_TURNS} turns, a screenshot of {SCREEN[0]}x{SCREEN[1]} each, one thread"
    print_table(console, title, ("sampling", "tokens/s", "a turn, ms", "ratio"), rows)
    return [
        {"bench": "engine", "figure": name, "unit": "tokens/s", **rates[name].fields(), "turn_ms": turns[name].fields()}
        for name in ways
    ]


async def _run_engine(model: Any, processor: Any, *, reuse: bool) -> Pass:
    engine = TransformersEngine(model, processor, reuse_kv_cache=reuse, max_batch=NUM_EPISODES)
    turns_s: list[float] = []

    async def play(talk: Talk) -> int:
        num_tokens = 0
        for _ in range(NUM_TURNS):
            request = talk.ask()
            started = time.perf_counter()
            result = await engine.generate(request)
            turns_s.append(time.perf_counter() - started)
            talk.add_response(result.token_ids)
            num_tokens += len(result.token_ids)
        return num_tokens

    started = time.perf_counter()
    talks = [Talk(renderer=Renderer(processor), index=index) for index in range(NUM_EPISODES)]
    try:
        counts = await asyncio.gather(*[play(talk) for talk in talks])
        return Pass(num_tokens=sum(counts), seconds=time.perf_counter() - started, turns_s=turns_s)
    finally:
        await engine.close()


@torch.inference_mode()
def _generate_plainly(model: Any, processor: Any) -> Pass:
    """The end-of-turn token ends a row of a batch, as it does in the engine; a batch ends with its last row."""
    talks = [Talk(renderer=Renderer(processor), index=index) for index in range(NUM_EPISODES)]
    cache, turns_s, num_tokens = PixelCache(), [], 0
    torch.manual_seed(0)
    begun = time.perf_counter()
    for _ in range(NUM_TURNS):
        requests = [talk.ask() for talk in talks]
        started = time.perf_counter()
        arrays = build_model_inputs(
            processor, [(each.token_ids, each.images) for each in requests], padding_side="left", cache=cache
        )
        inputs = {name: torch.from_numpy(array) for name, array in arrays.items()}
        output = model.generate(
            **inputs, do_sample=True, temperature=0.8, top_k=0, max_new_tokens=NUM_NEW_TOKENS,
            suppress_tokens=[processor.image_token_id, processor.video_token_id],
        )  # fmt: skip
        new_ids = output[:, inputs["input_ids"].shape[1] :].tolist()
        turns_s += [time.perf_counter() - started] * len(talks)
        for talk, row in zip(talks, new_ids, strict=True):
            while row and row[-1] == processor.tokenizer.pad_token_id:
                row.pop()
            num_tokens += len(row)
            talk.add_response(tuple(row))
    return Pass(num_tokens=num_tokens, seconds=time.perf_counter() - begun, turns_s=turns_s)


def _screenshot(seed: int) -> bytes:
    blocks = np.random.default_rng(seed).integers(0, 256, (SCREEN[1] // 8, SCREEN[0] // 8, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(blocks.repeat(8, axis=0).repeat(8, axis=1)).save(buffer, format="PNG")
    return buffer.getvalue()
