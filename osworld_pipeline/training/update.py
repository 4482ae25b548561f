"""One GSPO update: trains the policy on trajectories and returns its metrics."""

import math
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from osworld_pipeline.agent.adapters import Base
from osworld_pipeline.agent.model_inputs import PixelCache
from osworld_pipeline.domain.hold import HoldReason, hold_metrics
from osworld_pipeline.domain.trajectory import Trajectory
from osworld_pipeline.errors import TrainingError
from osworld_pipeline.recipes.schema import GspoSharedSection, TrainerSection
from osworld_pipeline.recipes.training_sections import TurnWeight
from osworld_pipeline.training.batch import Batch
from osworld_pipeline.training.between_passes import BetweenPasses
from osworld_pipeline.training.distributed.process_group import ProcessGroup
from osworld_pipeline.training.distributed_trainer import DistributedTrainer
from osworld_pipeline.training.objective.loss import PolicyLoss, policy_loss
from osworld_pipeline.training.objective.score import banned_ids_of, score_responses
from osworld_pipeline.training.objective.scored import ScoredBatch, ScoredTrajectory, score_batch
from osworld_pipeline.training.optimizer import MasterAdamW
from osworld_pipeline.training.parity.sampler_check import check_sampler
from osworld_pipeline.training.schedule import learning_rate_at
from osworld_pipeline.training.tally import Tally


class GspoTrainer(DistributedTrainer):
    """Holds the policy, a frozen reference (the phase's parent) and the optimiser."""

    def __init__(
        self,
        model: Any,
        processor: Any,
        settings: GspoSharedSection,
        *,
        reference: Any | None = None,
        seed: int = 0,
        section: TrainerSection | None = None,
        process_group: ProcessGroup | None = None,
        num_updates: int = 0,
        cache: PixelCache | None = None,
        base: Base | None = None,
        max_response_tokens: int = 400,
        phase_updates: int | None = None,
    ) -> None:
        """`reference` may be None if settings.kl_coef is 0, and under LoRA, where `model` holds its parent.
        `max_response_tokens`: the divisor of length_norm `constant`. `phase_updates`: number of updates of the
        learning-rate decay; needed if settings.final_lr_fraction is below 1."""
        if phase_updates is None and settings.final_lr_fraction < 1:
            raise ValueError("gspo.final_lr_fraction is below 1, so the number of updates is needed")
        has_adapters = section is not None and section.lora is not None
        if reference is None and settings.kl_coef > 0 and not has_adapters:
            raise ValueError("gspo.kl_coef is above 0, so a reference model is needed")
        optimizer = MasterAdamW(
            model.named_parameters(),
            learning_rate=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
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
            banned_ids=banned_ids_of(model, processor),
        )
        self._reference = reference
        self._has_adapters = has_adapters
        self._settings = settings
        self._seed = seed
        self._max_response_tokens = max_response_tokens
        self._phase_updates = phase_updates or 1

    def _update(self, trajectories: Sequence[Trajectory], breaks: BetweenPasses) -> dict[str, float]:
        """Without any advantage the weights stay unchanged, and `is_skipped` is 1. KL alone is no reason for an update,
        because Adam would scale its tiny gradient up to a full step. If the importance weights leave less than
        `min_effective_share` of the batch, the update is held: the weights stay unchanged, and `is_held` and
        `is_skipped` are both 1."""
        trained = [trajectory for trajectory in trajectories if not trajectory.is_canary]
        metrics = {
            "num_trajectories": float(len(trained)),
            "num_replay": float(sum(trajectory.is_replay for trajectory in trained)),
            "num_tokens": float(sum(len(trajectory.token_ids) for trajectory in trained)),
            "num_response_tokens": float(sum(trajectory.num_response_tokens for trajectory in trained)),
            "is_skipped": 1.0,
        }
        if not any(_has_signal(trajectory) for trajectory in trained):
            return metrics
        started = time.monotonic()
        first_epoch = self._minibatches(trained, 0)
        scored, sampler_metrics = self._score_all(trajectories, first_epoch, breaks)
        score_s = time.monotonic() - started - sampler_metrics["canary_wait_s"]
        metrics |= {"score_s": score_s} | sampler_metrics | scored.metrics
        if scored.effective_share < self._settings.min_effective_share:
            return {**metrics, **hold_metrics(HoldReason.STALENESS)}
        learning_rate = learning_rate_at(self._settings, self.num_updates, num_updates=self._phase_updates)
        self.optimizer.set_learning_rate(learning_rate)
        tally = Tally()
        by_trajectory = {id(item.trajectory): item for item in scored.items}
        for epoch in range(self._settings.epochs_per_update):
            for minibatch in first_epoch if epoch == 0 else self._minibatches(trained, epoch):
                self._optimizer_step(minibatch, by_trajectory, tally)
        metrics |= tally.merged(self.process_group.gather(tally)).metrics()
        return metrics | {
            "learning_rate": learning_rate,
            "tokens_per_s": metrics["num_tokens"] / (time.monotonic() - started - metrics["canary_wait_s"]),
            "is_skipped": 0.0,
        }

    def _score_all(
        self, trajectories: Sequence[Trajectory], minibatches: Sequence[Sequence[Trajectory]], breaks: BetweenPasses
    ) -> tuple[ScoredBatch, dict[str, float]]:
        """The trainer's own log-probabilities before the update, compared with the sampler's.

        They are computed over the same micro-batches with which the first epoch trains, so that the ratio of its first
        step is exactly 1: in bfloat16 another layout of the batch is rounded differently, which a clip of 3.5e-4 would
        treat as a change of the policy.
        """
        settings = self._settings
        groups = [self._with_gradient(minibatch) for minibatch in minibatches]
        own: list[torch.Tensor] = []
        refs: list[torch.Tensor | None] = []
        for group in groups:
            own += self._score(self.model, group, max_sequences=settings.micro_batch_size, before_pass=breaks.serve)
            refs += self._ref_logprobs(group, breaks)
        items = [trajectory for group in groups for trajectory in group]
        scored_at = time.monotonic()
        canaries = [trajectory for trajectory in trajectories if trajectory.is_canary]
        canaries += breaks.canaries(self.read_image)
        waited_s = time.monotonic() - scored_at
        sampler_metrics = check_sampler(
            [*items, *canaries],
            [*own, *(self._score(self.model, canaries) if canaries else ())],
            num_updates=self.num_updates,
            max_diff=settings.max_logprob_diff,
        )
        return score_batch(items, own, refs, settings), {**sampler_metrics, "canary_wait_s": waited_s}

    def _ref_logprobs(self, trajectories: Sequence[Trajectory], breaks: BetweenPasses) -> Sequence[torch.Tensor | None]:
        if not self._settings.kl_coef > 0:
            return [None] * len(trajectories)
        is_own = self._has_adapters
        return self._score(
            self.model if is_own else self._reference,
            trajectories,
            max_sequences=self._settings.micro_batch_size,
            as_parent=is_own,
            before_pass=breaks.serve,
        )

    def _with_gradient(self, minibatch: Sequence[Trajectory]) -> list[Trajectory]:
        """Without KL and entropy terms, a trajectory without advantage only counts in the denominators."""
        if self._settings.kl_coef > 0 or self._settings.entropy_coef > 0:
            return list(minibatch)
        return [trajectory for trajectory in minibatch if _has_signal(trajectory)]

    def _minibatches(self, trajectories: Sequence[Trajectory], epoch: int) -> list[list[Trajectory]]:
        """Episodes shuffled by seed and distributed evenly, with the sequences of an episode together; minibatches
        without any advantage are omitted."""
        by_episode: dict[str, list[Trajectory]] = {}
        for trajectory in sorted(trajectories, key=lambda one: one.trajectory_id):
            by_episode.setdefault(trajectory.episode_id, []).append(trajectory)
        order = list(by_episode.values())
        random.Random(f"{self._seed}:{self.num_updates}:{epoch}").shuffle(order)
        count = min(self._settings.minibatches_per_update, len(order))
        dealt = [[item for episode in order[start::count] for item in episode] for start in range(count)]
        return [part for part in dealt if any(_has_signal(trajectory) for trajectory in part)]

    def _optimizer_step(
        self, minibatch: Sequence[Trajectory], scored: Mapping[int, ScoredTrajectory], tally: Tally
    ) -> None:
        """The loss is a mean over the minibatch's episodes and replay rows, or over its tokens."""
        shares = turn_shares(minibatch, self._settings.turn_weight)
        num_tokens = sum(trajectory.num_response_tokens for trajectory in minibatch)
        num_sequences = len({trajectory.episode_id for trajectory in minibatch})
        started, loss = time.monotonic(), 0.0
        try:
            with self._training(seed=self._seed):
                passes = self._passes(self._with_gradient(minibatch), max_sequences=self._settings.micro_batch_size)
                for share, batch in passes:
                    items = [scored[id(trajectory)] for trajectory in share.trajectories]
                    weights = [self._weight(trajectory, shares) for trajectory in share.trajectories]
                    result = self._loss(items, batch, weights, num_sequences=num_sequences, num_tokens=num_tokens)
                    (result.loss * 0.0 if share.is_dummy else result.loss).backward()
                    self.optimizer.collect_gradients()
                    if not share.is_dummy:
                        loss += float(result.loss.detach())
                        tally.add(result, batch)
            total = self.process_group.sum(loss)
            if not math.isfinite(total):
                raise TrainingError(
                    f"update {self.num_updates + 1}: the loss is {total}: this optimiser step was not made, lower the "
                    "learning rate"
                )
            passed = time.monotonic()
            grad_norm = self.optimizer.step(max_grad_norm=self._settings.max_grad_norm)
        finally:
            self.optimizer.zero_grad()
        tally.add_step(
            loss=total, grad_norm=grad_norm, forward_s=passed - started, optimizer_s=time.monotonic() - passed
        )

    def _weight(self, trajectory: Trajectory, shares: Mapping[str, float]) -> float:
        """With length_norm `sequence_mean` the weight of an episode is divided among its sequences. The other norms
        count tokens, so each sequence has the full weight."""
        if self._settings.length_norm == "sequence_mean":
            return trajectory.weight * shares[trajectory.trajectory_id]
        return trajectory.weight

    def _loss(
        self,
        items: Sequence[ScoredTrajectory],
        batch: Batch,
        weights: Sequence[float],
        *,
        num_sequences: int,
        num_tokens: int,
    ) -> PolicyLoss:
        settings, device = self._settings, self.process_group.device
        scores = score_responses(self.model, batch, with_entropy=True)
        length = batch.response_mask_BT.shape[1]
        refs = [item.ref_logprobs for item in items if item.ref_logprobs is not None]
        return policy_loss(
            scores.logprobs_BT,
            _padded([item.old_logprobs for item in items], length).to(device),
            torch.tensor([item.trajectory.advantage for item in items], device=device),
            batch.response_mask_BT,
            algorithm=settings.algorithm,
            clip_low=settings.clip_low,
            clip_high=settings.clip_high,
            length_norm=settings.length_norm,
            max_response_tokens=self._max_response_tokens,
            ref_logprobs_BT=_padded(refs, length).to(device) if refs else None,
            kl_coef=settings.kl_coef,
            kl_estimator=settings.kl_estimator,
            entropy_BT=scores.entropy_BT,
            entropy_coef=settings.entropy_coef,
            importance_BT=_padded([item.importance for item in items], length).to(device),
            weights_B=torch.tensor(weights, device=device),
            num_sequences=num_sequences,
            num_tokens=num_tokens,
        )


def turn_shares(trajectories: Sequence[Trajectory], turn_weight: TurnWeight) -> dict[str, float]:
    """The share of a sequence in the weight of its episode, by trajectory id; in `append` mode 1."""
    size = {"turn": lambda one: 1, "token": lambda one: one.num_response_tokens}[turn_weight]
    totals: Counter[str] = Counter()
    for trajectory in trajectories:
        totals[trajectory.episode_id] += size(trajectory)
    return {one.trajectory_id: size(one) / totals[one.episode_id] for one in trajectories}


def _has_signal(trajectory: Trajectory) -> bool:
    return trajectory.advantage != 0.0 and trajectory.weight != 0.0


def _padded(rows: Sequence[torch.Tensor], length: int) -> torch.Tensor:
    padded = torch.zeros(len(rows), length)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
    return padded
