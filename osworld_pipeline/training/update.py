"""One GSPO update: trajectories in, a policy a little better, and the figures that say whether to believe it."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from osworld_pipeline.agent.model_inputs import PixelCache
from osworld_pipeline.domain.trajectory import Trajectory
from osworld_pipeline.errors import TrainingError
from osworld_pipeline.recipes.schema import GspoSharedSection
from osworld_pipeline.training.batch import Batch
from osworld_pipeline.training.loss import GspoLoss, gspo_loss
from osworld_pipeline.training.optimizer import MasterAdamW
from osworld_pipeline.training.score import device_of, micro_batches, score_responses, score_trajectories


@dataclass(frozen=True, kw_only=True)
class ScoredTrajectory:
    """A trajectory with the log-probabilities that the loss compares with, aligned with its token_ids."""

    trajectory: Trajectory
    old_logprobs: torch.Tensor
    """The sampler's own; for replay the trainer's before the update."""
    ref_logprobs: torch.Tensor | None


@dataclass(kw_only=True)
class _Tally:
    """Sums over optimiser steps."""

    loss: float = 0.0
    num_steps: int = 0
    grad_norms: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    clipped: list[float] = field(default_factory=list)
    kls: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)

    def add(self, result: GspoLoss) -> None:
        self.loss += float(result.loss.detach())
        self.ratios += result.ratio_B.tolist()
        self.clipped += result.is_clipped_B.float().tolist()
        self.kls += result.kl_B.tolist()
        self.entropies += result.entropy_B.tolist()

    def metrics(self) -> dict[str, float]:
        steps = max(self.num_steps, 1)
        return {
            "loss": self.loss / steps,
            "kl": _mean(self.kls),
            "entropy": _mean(self.entropies),
            "clip_fraction": _mean(self.clipped),
            "ratio_mean": _mean(self.ratios),
            "grad_norm": _mean(self.grad_norms),
            "num_optimizer_steps": float(self.num_steps),
        }


class GspoTrainer:
    """Holds the policy, a frozen reference (the phase's parent) and the optimiser."""

    def __init__(
        self,
        model: Any,
        processor: Any,
        settings: GspoSharedSection,
        *,
        reference: Any | None = None,
        seed: int = 0,
        cache: PixelCache | None = None,
    ) -> None:
        """`reference` may be None where settings.kl_coef is 0."""
        if reference is None and settings.kl_coef > 0:
            raise ValueError("gspo.kl_coef is above 0, so a reference model is needed")
        self.model = model
        self.processor = processor
        self.optimizer = MasterAdamW(
            model.parameters(),
            learning_rate=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            weight_decay=settings.weight_decay,
        )
        self._reference = reference
        self._settings = settings
        self._seed = seed
        self._cache = cache or PixelCache()

    def update(self, trajectories: Sequence[Trajectory], *, update: int) -> dict[str, float]:
        """Trains on the episodes of one update; returns its metrics.

        Without a single advantage there is nothing to learn: the weights stay, and `is_skipped` is 1. KL alone does not
        count, and Adam would blow its tiny gradient up to a full step.

        Raises:
            TrainingError: trainer and sampler disagree on the sampled tokens, a loss or gradient is not finite, or a
                trajectory is malformed.
        """
        metrics = {
            "num_trajectories": float(len(trajectories)),
            "num_replay": float(sum(trajectory.is_replay for trajectory in trajectories)),
            "num_tokens": float(sum(len(trajectory.token_ids) for trajectory in trajectories)),
            "num_response_tokens": float(sum(sum(trajectory.response_mask) for trajectory in trajectories)),
            "is_skipped": 1.0,
        }
        if not trajectories:
            return metrics
        scored, diff = self._score(trajectories, update)
        metrics["trainer_sampler_logprob_diff"] = diff
        tally = _Tally()
        for epoch in range(self._settings.epochs_per_update):
            for minibatch in self._minibatches(scored, update, epoch):
                self._optimizer_step(minibatch, tally, update)
        if tally.num_steps:
            metrics |= {**tally.metrics(), "is_skipped": 0.0}
        return metrics

    def _score(self, trajectories: Sequence[Trajectory], update: int) -> tuple[list[ScoredTrajectory], float]:
        """The trainer's own log-probabilities before the update, held against the sampler's."""
        own = score_trajectories(self.model, self.processor, trajectories, cache=self._cache)
        diff = self._check_sampler(trajectories, own, update)
        is_trained = any(_has_signal(trajectory) for trajectory in trajectories)
        refs: Sequence[torch.Tensor | None] = [None] * len(trajectories)
        if self._reference is not None and self._settings.kl_coef > 0 and is_trained:
            refs = score_trajectories(self._reference, self.processor, trajectories, cache=self._cache)
        scored = [
            ScoredTrajectory(
                trajectory=trajectory,
                old_logprobs=own_logprobs
                if trajectory.sampled_logprobs is None
                else torch.tensor(trajectory.sampled_logprobs, dtype=torch.float32),
                ref_logprobs=ref_logprobs,
            )
            for trajectory, own_logprobs, ref_logprobs in zip(trajectories, own, refs, strict=True)
        ]
        return scored, diff

    def _check_sampler(self, trajectories: Sequence[Trajectory], own: Sequence[torch.Tensor], update: int) -> float:
        """Mean absolute difference over the sampled tokens; 0 where nothing was sampled."""
        total, count = 0.0, 0
        worst = ("", 0.0)
        for trajectory, own_logprobs in zip(trajectories, own, strict=True):
            if trajectory.sampled_logprobs is None:
                continue
            mask = torch.tensor(trajectory.response_mask, dtype=torch.bool)
            diffs = (own_logprobs - torch.tensor(trajectory.sampled_logprobs, dtype=torch.float32))[mask].abs()
            total, count = total + float(diffs.sum()), count + len(diffs)
            if not float(diffs.mean()) <= worst[1]:
                worst = (trajectory.trajectory_id, float(diffs.mean()))
        diff = total / max(count, 1)
        if not diff <= self._settings.max_logprob_diff:
            raise TrainingError(
                f"update {update}: the trainer's log-probabilities of the sampled tokens differ from the sampler's by "
                f"{diff:.2g} on average, more than {self._settings.max_logprob_diff:g} (worst: {worst[0]} with "
                f"{worst[1]:.2g}); check that both run the same weights on the same tokens and images"
            )
        return diff

    def _minibatches(self, scored: Sequence[ScoredTrajectory], update: int, epoch: int) -> list[list[ScoredTrajectory]]:
        """Shuffled by seed, dealt out evenly; those without any advantage are left out."""
        order = sorted(scored, key=lambda item: item.trajectory.trajectory_id)
        random.Random(f"{self._seed}:{update}:{epoch}").shuffle(order)
        count = min(self._settings.minibatches_per_update, len(order))
        dealt = [order[start::count] for start in range(count)]
        return [part for part in dealt if any(_has_signal(item.trajectory) for item in part)]

    def _optimizer_step(self, minibatch: Sequence[ScoredTrajectory], tally: _Tally, update: int) -> None:
        by_trajectory = {id(item.trajectory): item for item in minibatch}
        parts = micro_batches(
            self.model,
            self.processor,
            [item.trajectory for item in minibatch],
            cache=self._cache,
            max_sequences=self._settings.micro_batch_size,
        )
        try:
            for trajectories, batch in parts:
                items = [by_trajectory[id(trajectory)] for trajectory in trajectories]
                result = self._loss(items, batch, num_sequences=len(minibatch))
                if not math.isfinite(float(result.loss.detach())):
                    raise TrainingError(
                        f"update {update}: the loss is {float(result.loss.detach())}; the weights are left as they were"
                    )
                result.loss.backward()
                self.optimizer.collect_gradients()
                tally.add(result)
            tally.grad_norms.append(self.optimizer.step(max_grad_norm=self._settings.max_grad_norm))
        finally:
            self.optimizer.zero_grad()
        tally.num_steps += 1

    def _loss(self, items: Sequence[ScoredTrajectory], batch: Batch, *, num_sequences: int) -> GspoLoss:
        settings, device = self._settings, device_of(self.model)
        scores = score_responses(self.model, batch, with_entropy=True)
        length = batch.input_ids_BT.shape[1]
        refs = [item.ref_logprobs for item in items if item.ref_logprobs is not None]
        return gspo_loss(
            scores.logprobs_BT,
            _padded([item.old_logprobs for item in items], length).to(device),
            torch.tensor([item.trajectory.advantage for item in items], device=device),
            batch.response_mask_BT,
            clip_low=settings.clip_low,
            clip_high=settings.clip_high,
            ref_logprobs_BT=_padded(refs, length).to(device) if refs else None,
            kl_coef=settings.kl_coef,
            entropy_BT=scores.entropy_BT,
            entropy_coef=settings.entropy_coef,
            weights_B=torch.tensor([item.trajectory.weight for item in items], device=device),
            num_sequences=num_sequences,
        )


def _has_signal(trajectory: Trajectory) -> bool:
    return trajectory.advantage != 0.0 and trajectory.weight != 0.0


def _padded(rows: Sequence[torch.Tensor], length: int) -> torch.Tensor:
    padded = torch.zeros(len(rows), length)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
    return padded


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0
