"""The first on-policy update, with a real sampler: the difference of its log-probabilities from the trainer's, and the
share of sequences that a clip of 3.5e-4 cuts because of rounding, in float32 and bfloat16."""

import asyncio
import random
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.spread import print_table, verdict
from osworld_pipeline.agent.processor import load_processor
from osworld_pipeline.agent.renderer import Renderer
from osworld_pipeline.domain.episode import SamplingParams
from osworld_pipeline.domain.trajectory import Trajectory
from osworld_pipeline.protocols import GenerateRequest, GenerateResult
from osworld_pipeline.recipes.schema import GspoSharedSection, TinyModelSection
from osworld_pipeline.rollout.engines.transformers import TransformersEngine
from osworld_pipeline.training.model import load_model
from osworld_pipeline.training.tiny.model import build_tiny_checkpoint
from osworld_pipeline.training.update import GspoTrainer

MAX_CLIPPED_SHARE = 0.001
NUM_SEQUENCES, NUM_TOKENS, TEMPERATURE = 96, 48, 0.8
SETTINGS = GspoSharedSection(kl_coef=0.0, minibatches_per_update=1, micro_batch_size=8, max_logprob_diff=0.05)
"""The published clip, 3.5e-4."""


def run_exactness(console: Console, *, seed: int = 0) -> list[dict[str, Any]]:
    folder = Path(tempfile.mkdtemp(prefix="bench-exactness-"))
    try:
        words = [f"{left}{right}" for left in "abcdefghij" for right in "klmnopqrst"]
        build_tiny_checkpoint(folder / "model", TinyModelSection(kind="tiny"), (" ".join(words) for _ in range(50)))
        results = [_measure(folder / "model", dtype, seed) for dtype in ("float32", "bfloat16")]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print_table(
        console,
        f"First on-policy update of {NUM_SEQUENCES} sampled responses at temperature {TEMPERATURE}, clip 3.5e-4",
        ("weights", "mean |log p difference|", "clipped, old: trainer's", "clipped, old: sampler's", "effective share"),
        [
            (
                str(one["dtype"]),
                f"{one['logprob_diff']:.2g}",
                f"{one['clipped_trainer']:.2%}",
                f"{one['clipped_sampler']:.2%}",
                f"{one['effective_share']:.4f}",
            )
            for one in results
        ],
    )
    worst = max(one["clipped_trainer"] for one in results)
    console.print(
        f"clipped by rounding: {worst:.2%}, below {MAX_CLIPPED_SHARE:.1%}: {verdict(worst < MAX_CLIPPED_SHARE)}"
    )
    return results


def _measure(folder: Path, dtype: str, seed: int) -> dict[str, Any]:
    found: dict[str, dict[str, float]] = {}
    trajectories = asyncio.run(_sample(folder, dtype, seed))
    for old in ("trainer", "sampler"):
        settings = SETTINGS.model_copy(
            update={"old_logprobs": old, "importance": "none" if old == "sampler" else "token_truncate"}
        )
        trainer = GspoTrainer(_model(folder, dtype), load_processor(folder), settings)
        found[old] = trainer.update(trajectories)
    return {
        "bench": "exactness",
        "dtype": dtype,
        "logprob_diff": found["trainer"]["trainer_sampler_logprob_diff"],
        "clipped_trainer": found["trainer"]["first_step_clipped_share"],
        "clipped_sampler": found["sampler"]["first_step_clipped_share"],
        "effective_share": found["trainer"]["effective_share"],
    }


def _model(folder: Path, dtype: str) -> Any:
    model = load_model(folder, dtype=dtype)
    # Fresh weights give nearly equal logits; larger weights give more distinct ones.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3.0)
    return model


async def _sample(folder: Path, dtype: str, seed: int) -> list[Trajectory]:
    """Sample with the in-process engine: batched, token by token, with a key-value cache."""
    processor, rng = load_processor(folder), random.Random(seed)
    renderer = Renderer(processor)
    engine = TransformersEngine(_model(folder, dtype), processor, timeout_s=600, num_threads=torch.get_num_threads())
    try:
        requests = [
            GenerateRequest(
                token_ids=(*rng.choices(renderer.encode("abcdefghij klm nop"), k=rng.randint(20, 200)),),
                sampling=SamplingParams(temperature=TEMPERATURE, max_new_tokens=NUM_TOKENS, stop=(), seed=number),
            )
            for number in range(NUM_SEQUENCES)
        ]
        results = await asyncio.gather(*(engine.generate(request) for request in requests))
    finally:
        await engine.close()
    return [
        replace(_trajectory(number, request, result), advantage=rng.choice([-1.0, 1.0]))
        for number, (request, result) in enumerate(zip(requests, results, strict=True))
    ]


def _trajectory(number: int, request: GenerateRequest, result: GenerateResult) -> Trajectory:
    prompt = len(request.token_ids)
    return Trajectory(
        trajectory_id=f"s{number}",
        task_id="t",
        token_ids=(*request.token_ids, *result.token_ids),
        response_mask=(*(0,) * prompt, *(1,) * len(result.token_ids)),
        images=(),
        sampled_logprobs=(*(0.0,) * prompt, *result.logprobs),
        temperature=TEMPERATURE,
    )
