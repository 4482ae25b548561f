"""Supervised fine-tuning on trajectories: the loss covers the demonstrator's tokens; batches follow from the seed."""

import math
import random
import time
from collections.abc import Sequence
from typing import Any

from osworld_pipeline.agent.adapters import Base
from osworld_pipeline.agent.model_inputs import PixelCache
from osworld_pipeline.domain.trajectory import Trajectory
from osworld_pipeline.errors import TrainingError
from osworld_pipeline.recipes.schema import SftSection, TrainerSection
from osworld_pipeline.training.between_passes import BetweenPasses
from osworld_pipeline.training.distributed.process_group import ProcessGroup
from osworld_pipeline.training.distributed_trainer import DistributedTrainer
from osworld_pipeline.training.objective.loss import sft_loss
from osworld_pipeline.training.objective.score import score_responses
from osworld_pipeline.training.optimizer import MasterAdamW
from osworld_pipeline.training.schedule import learning_rate_at

BETAS = (0.9, 0.98)


def batch_indices(*, num_examples: int, batch_size: int, seed: int, update: int) -> list[int]:
    """The examples that update number `update` (from 0) trains on.

    Every epoch has its own permutation; a batch may cross from one epoch to the next. The result depends only on the
    arguments, so a resumed run sees the batches of an uninterrupted one.
    """
    chosen: list[int] = []
    for position in range(update * batch_size, (update + 1) * batch_size):
        epoch, offset = divmod(position, num_examples)
        order = list(range(num_examples))
        random.Random(f"{seed}:{epoch}").shuffle(order)
        chosen.append(order[offset])
    return chosen


def examples_seen(*, num_examples: int, batch_size: int, seed: int, num_updates: int) -> list[int]:
    """The examples that the first `num_updates` updates train on at least once."""
    num_drawn = num_updates * batch_size
    if num_drawn >= num_examples:
        return list(range(num_examples))
    order = list(range(num_examples))
    random.Random(f"{seed}:0").shuffle(order)
    return sorted(order[:num_drawn])


class SftTrainer(DistributedTrainer):
    """Call `update` with the batch of that update; `batch_indices` selects it."""

    def __init__(
        self,
        model: Any,
        processor: Any,
        settings: SftSection,
        *,
        section: TrainerSection | None = None,
        process_group: ProcessGroup | None = None,
        num_updates: int = 0,
        cache: PixelCache | None = None,
        base: Base | None = None,
    ) -> None:
        optimizer = MasterAdamW(
            model.named_parameters(),
            learning_rate=settings.learning_rate,
            betas=BETAS,
            weight_decay=settings.weight_decay,
        )
        super().__init__(
            model,
            processor,
            optimizer,
            section=section,
            process_group=process_group,
            num_updates=num_updates,
            cache=cache,
            base=base,
        )
        self._settings = settings

    def _update(self, trajectories: Sequence[Trajectory], breaks: BetweenPasses) -> dict[str, float]:
        if not trajectories:
            raise TrainingError("no demonstrations to train on: the replay buffer is empty, build it first")
        started = time.monotonic()
        num_tokens = sum(len(trajectory.token_ids) for trajectory in trajectories)
        num_response_tokens = sum(sum(trajectory.response_mask) for trajectory in trajectories)
        learning_rate = learning_rate_at(self._settings, self.num_updates, num_updates=self._settings.num_updates)
        self.optimizer.set_learning_rate(learning_rate)
        try:
            loss, num_positions = self._accumulate(trajectories, num_response_tokens)
            if not math.isfinite(loss):
                raise TrainingError(
                    f"update {self.num_updates + 1}: the loss is {loss}; weights are unchanged, lower sft.learning_rate"
                )
            grad_norm = self.optimizer.step(max_grad_norm=self._settings.max_grad_norm)
        finally:
            self.optimizer.zero_grad()
        return {
            "loss": loss,
            "learning_rate": learning_rate,
            "grad_norm": grad_norm,
            "num_trajectories": float(len(trajectories)),
            "num_tokens": float(num_tokens),
            "num_response_tokens": float(num_response_tokens),
            "tokens_per_s": num_tokens / (time.monotonic() - started),
            "padding_share": 1 - num_tokens / num_positions,
        }

    def _accumulate(self, trajectories: Sequence[Trajectory], num_response_tokens: int) -> tuple[float, float]:
        """Gradients of all passes; returns the loss and the number of computed positions, over all ranks."""
        loss, num_positions = 0.0, 0
        with self._training(seed=self._settings.seed):
            for share, batch in self._passes(trajectories, max_sequences=None):
                scores = score_responses(self.model, batch)
                part = sft_loss(scores.logprobs_BT, batch.response_mask_BT, num_tokens=num_response_tokens)
                if share.is_dummy:
                    part = part * 0.0
                part.backward()
                self.optimizer.collect_gradients()
                if not share.is_dummy:
                    loss += float(part.detach())
                    num_positions += batch.input_ids_RL.numel()
        sums = self.process_group.gather((loss, num_positions))
        return sum(one for one, _ in sums), sum(positions for _, positions in sums)
