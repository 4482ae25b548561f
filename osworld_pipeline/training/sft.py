"""Supervised fine-tuning on trajectories: the loss is on what the demonstrator wrote, batches follow from the seed."""

import math
import random
from collections.abc import Sequence
from typing import Any

from osworld_pipeline.agent.model_inputs import PixelCache
from osworld_pipeline.domain.trajectory import Trajectory
from osworld_pipeline.errors import TrainingError
from osworld_pipeline.recipes.schema import SftSection
from osworld_pipeline.training.loss import sft_loss
from osworld_pipeline.training.optimizer import MasterAdamW
from osworld_pipeline.training.score import micro_batches, score_responses

BETAS = (0.9, 0.98)


def batch_indices(*, num_examples: int, batch_size: int, seed: int, update: int) -> list[int]:
    """Which examples update number `update` (from 0) trains on.

    Every epoch is a permutation of its own; a batch may end one and begin the next. Nothing but the arguments decides,
    so a resumed run sees the batches that an uninterrupted one would have seen.
    """
    chosen: list[int] = []
    for position in range(update * batch_size, (update + 1) * batch_size):
        epoch, offset = divmod(position, num_examples)
        order = list(range(num_examples))
        random.Random(f"{seed}:{epoch}").shuffle(order)
        chosen.append(order[offset])
    return chosen


def learning_rate_at(settings: SftSection, update: int) -> float:
    """Linear warm-up to the full rate, then a cosine down to `final_lr_fraction` of it at the last update."""
    if update < settings.warmup_updates:
        return settings.learning_rate * (update + 1) / settings.warmup_updates
    span = max(1, settings.num_updates - 1 - settings.warmup_updates)
    progress = min(1.0, (update - settings.warmup_updates) / span)
    floor = settings.final_lr_fraction
    return settings.learning_rate * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))


class SftTrainer:
    def __init__(
        self,
        model: Any,
        processor: Any,
        settings: SftSection,
        trajectories: Sequence[Trajectory],
        *,
        cache: PixelCache | None = None,
    ) -> None:
        """`trajectories` are read by index when their turn comes; their order is part of what a seed repeats."""
        if not trajectories:
            raise TrainingError("no demonstrations to train on: the replay buffer is empty, build it first")
        self.model = model
        self.processor = processor
        self.optimizer = MasterAdamW(
            model.parameters(),
            learning_rate=settings.learning_rate,
            betas=BETAS,
            weight_decay=settings.weight_decay,
        )
        self._settings = settings
        self._trajectories = trajectories
        self._cache = cache or PixelCache()

    def update(self, update: int) -> dict[str, float]:
        """One optimiser step on the batch of that index; returns its metrics.

        Raises:
            TrainingError: loss or gradient not finite, or a malformed trajectory.
        """
        settings = self._settings
        chosen = batch_indices(
            num_examples=len(self._trajectories), batch_size=settings.batch_size, seed=settings.seed, update=update
        )
        trajectories = [self._trajectories[index] for index in chosen]
        num_tokens = sum(sum(trajectory.response_mask) for trajectory in trajectories)
        learning_rate = learning_rate_at(settings, update)
        self.optimizer.set_learning_rate(learning_rate)
        total = 0.0
        try:
            for _, batch in micro_batches(self.model, self.processor, trajectories, cache=self._cache):
                scores = score_responses(self.model, batch)
                loss = sft_loss(scores.logprobs_BT, batch.response_mask_BT, num_tokens=num_tokens)
                loss.backward()
                self.optimizer.collect_gradients()
                total += float(loss.detach())
            if not math.isfinite(total):
                raise TrainingError(
                    f"update {update}: the loss is {total}; weights are left as they were, lower sft.learning_rate"
                )
            grad_norm = self.optimizer.step(max_grad_norm=settings.max_grad_norm)
        finally:
            self.optimizer.zero_grad()
        return {
            "loss": total,
            "learning_rate": learning_rate,
            "grad_norm": grad_norm,
            "num_trajectories": float(len(trajectories)),
            "num_tokens": float(sum(len(trajectory.token_ids) for trajectory in trajectories)),
            "num_response_tokens": float(num_tokens),
        }
