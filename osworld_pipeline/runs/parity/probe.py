"""The parity probe. Before the first episode, an engine samples a few tokens of fixed conversations, and the
log-probabilities that it reports are compared with a forward pass of the checkpoint that it is to sample
(docs/decisions/0022-compare-each-engine-with-its-checkpoint.md)."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from osworld_pipeline.agent.parity_cases import ParitySample, parity_cases
from osworld_pipeline.agent.renderer import Renderer
from osworld_pipeline.domain.episode import Parity
from osworld_pipeline.errors import EngineError
from osworld_pipeline.protocols import PolicyEngine
from osworld_pipeline.recipes import Recipe
from osworld_pipeline.rollout.canary import Generate
from osworld_pipeline.rollout.parity_questions import ask_cases
from osworld_pipeline.runs.parity.verdict import Verdict, judge

LoadReference = Callable[[str | None], Any]
"""Loads the weights that the engine is to sample from; the argument is the device, None the default device."""


@dataclass(frozen=True, kw_only=True)
class ParityReport(Parity):
    seconds: float

    def metrics(self) -> dict[str, float]:
        return {"parity_mean_diff": self.mean_diff, "parity_max_diff": self.max_diff, "parity_s": self.seconds}


async def probe_parity(
    engine: PolicyEngine,
    generators: Mapping[str, Generate],
    *,
    recipe: Recipe,
    renderer: Renderer,
    load_reference: LoadReference,
) -> ParityReport:
    """`generators`: the `generate` of each server, by its name in errors; `load_reference`: called in a thread.

    Raises:
        EngineError: a server does not answer, or does not sample from that model; names the server and the likely
            defect.
        StoreError: the checkpoint cannot be loaded.
    """
    started = time.monotonic()
    cases = await asyncio.to_thread(parity_cases, recipe.agent, recipe.desktop)
    max_tokens = recipe.agent.max_context_tokens
    sampled = {
        name: await ask_cases(generate, engine.forget, cases, renderer, max_context_tokens=max_tokens)
        for name, generate in generators.items()
    }
    verdicts = await asyncio.to_thread(judge_all, sampled, load_reference, renderer)
    for name, verdict in verdicts.items():
        if verdict.finding is not None:
            raise EngineError(refusal(name, verdict))
    num_tokens = sum(verdict.num_tokens for verdict in verdicts.values())
    return ParityReport(
        num_tokens=num_tokens,
        mean_diff=sum(verdict.mean_diff * verdict.num_tokens for verdict in verdicts.values()) / num_tokens,
        max_diff=max(verdict.max_diff for verdict in verdicts.values()),
        seconds=time.monotonic() - started,
    )


def judge_all(
    sampled: Mapping[str, Sequence[ParitySample]], load_reference: LoadReference, renderer: Renderer
) -> dict[str, Verdict]:
    """Verdicts by name. Runs on the CPU if the accelerator has no memory left for the model."""
    import torch

    from osworld_pipeline.training.parity.reference import ParityReference

    def judge_on(device: str | None) -> dict[str, Verdict]:
        reference = ParityReference(load_reference(device), renderer)
        return {name: judge(samples, reference) for name, samples in sampled.items()}

    try:
        return judge_on(None)
    except torch.OutOfMemoryError:
        return judge_on("cpu")
    finally:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def refusal(name: str, verdict: Verdict, *, against: str = "the checkpoint") -> str:
    """The error message for a refused engine. `against`: what it was compared with."""
    finding = verdict.finding
    assert finding is not None, "an engine without a finding is not refused"
    fit = (
        "the cause is not known more precisely"
        if finding.left is None
        else f"a forward pass with this defect differs by {finding.left:.1g}"
    )
    return (
        f"{name} fails the parity probe: it {finding.name}. In the case '{finding.case}' the log-probabilities that it "
        f"reports differ from those of {against} by {finding.mean_diff:.2g} a token on average (at most "
        f"{finding.max_diff:.2g}), where up to {verdict.tolerance.limit:.2g} can be rounding; {fit}. To continue, "
        f"{finding.advice}; engine.parity_probe = false disables the probe"
    )
