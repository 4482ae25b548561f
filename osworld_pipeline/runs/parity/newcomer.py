"""The parity probe of an sglang server that joins during a run. Compares it with a server that has passed, or with the
checkpoint that it is to sample if there is none (docs/decisions/0022-compare-each-engine-with-its-checkpoint.md)."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from osworld_pipeline.agent.parity_cases import ParitySample, parity_cases
from osworld_pipeline.agent.renderer import Renderer
from osworld_pipeline.errors import EngineError, PipelineError
from osworld_pipeline.recipes import Recipe
from osworld_pipeline.rollout.engines.http_calls import TransientError
from osworld_pipeline.rollout.engines.sglang_newcomers import Compare, Peer
from osworld_pipeline.rollout.parity_questions import ask_cases
from osworld_pipeline.runs.parity.peers import Scored, judge_by_peer
from osworld_pipeline.runs.parity.probe import judge_all, refusal
from osworld_pipeline.runs.parity.verdict import Verdict, tolerance_of

LoadCheckpoint = Callable[[Path], Any]
"""Loads the model of a checkpoint folder into host memory, because trainers and engines may need the accelerator's."""


def newcomer_check(recipe: Recipe, renderer: Renderer, *, load: LoadCheckpoint) -> Compare:
    """`load`: called in a thread, only if no server has passed yet."""
    tolerance = tolerance_of(getattr(recipe.model, "dtype", "float32"))

    async def answers_of(server: Peer) -> list[ParitySample]:
        cases = await asyncio.to_thread(parity_cases, recipe.agent, recipe.desktop)
        max_tokens = recipe.agent.max_context_tokens
        return await ask_cases(server.generate, _forget, cases, renderer, max_context_tokens=max_tokens)

    async def compare(newcomer: Peer, reference: Peer | Path) -> None:
        samples = await answers_of(newcomer)
        if isinstance(reference, Path):
            verdict = await asyncio.to_thread(_judge_by_folder, samples, reference, renderer, load)
            against = "the checkpoint"
        else:
            try:
                passed = await _scored(await answers_of(reference), reference)
                verdict = judge_by_peer(await _scored(samples, reference), passed, tolerance)
            except TransientError:
                raise
            except EngineError as error:  # not the newcomer's fault
                raise TransientError(f"the comparison with {reference.name} failed: {error}") from error
            against = f"{reference.name}, which has passed,"
        if verdict.finding is not None:
            raise EngineError(refusal(newcomer.name, verdict, against=against))

    return compare


async def _scored(samples: Sequence[ParitySample], server: Peer) -> Scored:
    """Raises TransientError or EngineError if the server does not score them."""
    calls = (server.score(sample.request, sample.result.token_ids) for sample in samples)
    results = await asyncio.gather(*calls, return_exceptions=True)
    scores: list[Sequence[float]] = []
    for result in results:
        if isinstance(result, BaseException):
            raise result
        scores.append(result)
    return Scored(samples=samples, scores=scores)


def _judge_by_folder(
    samples: Sequence[ParitySample], folder: Path, renderer: Renderer, load: LoadCheckpoint
) -> Verdict:
    try:
        return judge_all({"it": samples}, lambda device: load(folder), renderer)["it"]
    except (PipelineError, OSError, ImportError, MemoryError, RuntimeError) as error:
        message = f"the comparison with the checkpoint at {folder} failed: {error or type(error).__name__}"
        raise TransientError(message) from error


async def _forget(episode_id: str) -> None:
    """A probe prompt is not an episode, so the server keeps no state for it."""
