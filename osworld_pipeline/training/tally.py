"""Statistics of an update's optimiser steps, collected over passes, steps and ranks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from osworld_pipeline.training.batch import Batch
from osworld_pipeline.training.objective.loss import PolicyLoss


@dataclass(kw_only=True)
class Tally:
    """Per-sequence values, token counts and times are those of this rank; losses and gradient norms are those of all
    ranks."""

    num_steps: int = 0
    loss: float = 0.0
    grad_norms: list[float] = field(default_factory=list)
    forward_s: float = 0.0
    optimizer_s: float = 0.0
    num_tokens: int = 0
    num_positions: int = 0
    """Number of tokens, padding included."""
    ratios: list[float] = field(default_factory=list)
    clipped: list[float] = field(default_factory=list)
    first_clipped: list[float] = field(default_factory=list)
    """Clip fraction of the first step. If the old log-probabilities are the trainer's, the ratios of this step are 1,
    and a value above 0 is due to rounding."""
    kls: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    importances: list[float] = field(default_factory=list)

    def add(self, result: PolicyLoss, batch: Batch) -> None:
        """One pass."""
        self.ratios += result.ratio_B.tolist()
        self.clipped += result.clipped_B.tolist()
        if not self.num_steps:
            self.first_clipped += result.clipped_B.tolist()
        self.kls += result.kl_B.tolist()
        self.entropies += result.entropy_B.tolist()
        self.importances += result.importance_B.tolist()
        self.num_tokens += batch.num_tokens
        self.num_positions += batch.input_ids_RL.numel()

    def add_step(self, *, loss: float, grad_norm: float, forward_s: float, optimizer_s: float) -> None:
        self.num_steps += 1
        self.loss += loss
        self.grad_norms.append(grad_norm)
        self.forward_s += forward_s
        self.optimizer_s += optimizer_s

    def merged(self, tallies: Sequence["Tally"]) -> "Tally":
        """This one with the sequences of all ranks."""
        return Tally(
            num_steps=self.num_steps,
            loss=self.loss,
            grad_norms=self.grad_norms,
            forward_s=self.forward_s,
            optimizer_s=self.optimizer_s,
            num_tokens=sum(tally.num_tokens for tally in tallies),
            num_positions=sum(tally.num_positions for tally in tallies),
            ratios=[value for tally in tallies for value in tally.ratios],
            clipped=[value for tally in tallies for value in tally.clipped],
            first_clipped=[value for tally in tallies for value in tally.first_clipped],
            kls=[value for tally in tallies for value in tally.kls],
            entropies=[value for tally in tallies for value in tally.entropies],
            importances=[value for tally in tallies for value in tally.importances],
        )

    def metrics(self) -> dict[str, float]:
        return {
            "loss": self.loss / max(self.num_steps, 1),
            "kl": _mean(self.kls),
            "entropy": _mean(self.entropies),
            "clipped_share": _mean(self.clipped),
            "first_step_clipped_share": _mean(self.first_clipped),
            "ratio_mean": _mean(self.ratios),
            "importance_mean": _mean(self.importances),
            "grad_norm": _mean(self.grad_norms),
            "num_optimizer_steps": float(self.num_steps),
            "forward_s": self.forward_s,
            "optimizer_s": self.optimizer_s,
            "padding_share": 1 - self.num_tokens / max(self.num_positions, 1),
        }


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0
