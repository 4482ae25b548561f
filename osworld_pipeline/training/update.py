"""One GSPO update: trajectories in, a policy a little better, and the figures that say whether to believe it."""

import math
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from osworld_pipeline.agent.adapters import Base
from osworld_pipeline.agent.model_inputs import PixelCache
from osworld_pipeline.domain.trajectory import Trajectory
from osworld_pipeline.errors import TrainingError
from osworld_pipeline.recipes.schema import GspoSharedSection, TrainerSection
from osworld_pipeline.training.batch import Batch
from osworld_pipeline.training.loss import PolicyLoss, policy_loss
from osworld_pipeline.training.optimizer import MasterAdamW
from osworld_pipeline.training.ranked import RankedTrainer
from osworld_pipeline.training.ranks import Ranks
from osworld_pipeline.training.sampler_check import ScoredTrajectory, check_sampler
from osworld_pipeline.training.score import score_responses
from osworld_pipeline.training.tally import Tally


class GspoTrainer(RankedTrainer):
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
        ranks: Ranks | None = None,
        num_updates: int = 0,
        cache: PixelCache | None = None,
        base: Base | None = None,
        max_response_tokens: int = 400,
    ) -> None:
        """`reference` may be None where settings.kl_coef is 0, and under LoRA, where `model` holds its parent.
        `max_response_tokens` is what length_norm `constant` divides by."""
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
            ranks=ranks,
            num_updates=num_updates,
            cache=cache,
            base=base,
        )
        self._reference = reference
        self._has_adapters = has_adapters
        self._settings = settings
        self._seed = seed
        self._max_response_tokens = max_response_tokens

    def _update(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Without a single advantage there is nothing to learn: the weights stay, and `is_skipped` is 1. KL alone does
        not count, and Adam would blow its tiny gradient up to a full step."""
        metrics = {
            "num_trajectories": float(len(trajectories)),
            "num_replay": float(sum(trajectory.is_replay for trajectory in trajectories)),
            "num_tokens": float(sum(len(trajectory.token_ids) for trajectory in trajectories)),
            "num_response_tokens": float(sum(sum(trajectory.response_mask) for trajectory in trajectories)),
            "is_skipped": 1.0,
        }
        if not trajectories:
            return metrics
        started = time.monotonic()
        scored, sampler_metrics = self._score_all(trajectories)
        score_s = time.monotonic() - started
        tally = Tally()
        for epoch in range(self._settings.epochs_per_update):
            for minibatch in self._minibatches(scored, epoch):
                self._optimizer_step(minibatch, tally)
        total_s = time.monotonic() - started
        metrics |= sampler_metrics
        metrics |= {"score_s": score_s, "tokens_per_s": metrics["num_tokens"] / total_s}
        if tally.num_steps:
            metrics |= {**tally.merged(self.ranks.gather(tally)).metrics(), "is_skipped": 0.0}
        return metrics

    def _score_all(self, trajectories: Sequence[Trajectory]) -> tuple[list[ScoredTrajectory], dict[str, float]]:
        """The trainer's own log-probabilities before the update, held against the sampler's."""
        own = self._score(self.model, trajectories)
        sampler_metrics = check_sampler(
            trajectories, own, num_updates=self.num_updates, max_diff=self._settings.max_logprob_diff
        )
        refs: Sequence[torch.Tensor | None] = [None] * len(trajectories)
        if self._settings.kl_coef > 0 and any(_has_signal(trajectory) for trajectory in trajectories):
            if self._has_adapters:
                refs = self._score(self.model, trajectories, as_parent=True)
            else:
                refs = self._score(self._reference, trajectories)
        scored = [
            ScoredTrajectory.of(trajectory, own_logprobs, ref_logprobs)
            for trajectory, own_logprobs, ref_logprobs in zip(trajectories, own, refs, strict=True)
        ]
        return scored, sampler_metrics

    def _minibatches(self, scored: Sequence[ScoredTrajectory], epoch: int) -> list[list[ScoredTrajectory]]:
        """Episodes shuffled by seed and dealt out evenly, the sequences of one together; minibatches without any
        advantage are left out."""
        by_episode: dict[str, list[ScoredTrajectory]] = {}
        for item in sorted(scored, key=lambda item: item.trajectory.trajectory_id):
            by_episode.setdefault(_episode_of(item.trajectory), []).append(item)
        order = list(by_episode.values())
        random.Random(f"{self._seed}:{self.num_updates}:{epoch}").shuffle(order)
        count = min(self._settings.minibatches_per_update, len(order))
        dealt = [[item for episode in order[start::count] for item in episode] for start in range(count)]
        return [part for part in dealt if any(_has_signal(item.trajectory) for item in part)]

    def _optimizer_step(self, minibatch: Sequence[ScoredTrajectory], tally: Tally) -> None:
        """The loss is a mean over episodes and replay rows: in `window` mode the sequences of one share its weight, so
        that both context modes weigh an episode the same."""
        by_trajectory = {id(item.trajectory): item for item in minibatch}
        trajectories = [item.trajectory for item in minibatch]
        num_tokens = sum(sum(trajectory.response_mask) for trajectory in trajectories)
        num_turns = Counter(_episode_of(one) for one in {item.trajectory_id: item for item in trajectories}.values())
        started, loss = time.monotonic(), 0.0
        try:
            with self._training(seed=self._seed):
                for share, batch in self._passes(trajectories, max_sequences=self._settings.micro_batch_size):
                    items = [by_trajectory[id(trajectory)] for trajectory in share.trajectories]
                    weights = [self._weight(trajectory, num_turns) for trajectory in share.trajectories]
                    result = self._loss(items, batch, weights, num_sequences=len(num_turns), num_tokens=num_tokens)
                    (result.loss * 0.0 if share.is_dummy else result.loss).backward()
                    self.optimizer.collect_gradients()
                    if not share.is_dummy:
                        loss += float(result.loss.detach())
                        tally.add(result, batch)
            total = self.ranks.sum(loss)
            if not math.isfinite(total):
                raise TrainingError(
                    f"update {self.num_updates}: the loss is {total}; the weights are left as they were"
                )
            passed = time.monotonic()
            grad_norm = self.optimizer.step(max_grad_norm=self._settings.max_grad_norm)
        finally:
            self.optimizer.zero_grad()
        tally.add_step(
            loss=total, grad_norm=grad_norm, forward_s=passed - started, optimizer_s=time.monotonic() - passed
        )

    def _weight(self, trajectory: Trajectory, num_turns: Mapping[str, int]) -> float:
        """Where length_norm counts tokens, those of a `window` sequence count as they would in `append` mode: by the
        weight of the whole episode, which is dealt out evenly among its sequences."""
        if self._settings.length_norm == "sequence_mean":
            return trajectory.weight
        return trajectory.weight * num_turns[_episode_of(trajectory)]

    def _loss(
        self,
        items: Sequence[ScoredTrajectory],
        batch: Batch,
        weights: Sequence[float],
        *,
        num_sequences: int,
        num_tokens: int,
    ) -> PolicyLoss:
        """Without an importance cap the sampler's own log-probabilities are the old ones, with one the trainer's."""
        settings, device = self._settings, self.ranks.device
        scores = score_responses(self.model, batch, with_entropy=True)
        length = batch.response_mask_BT.shape[1]
        refs = [item.ref_logprobs for item in items if item.ref_logprobs is not None]
        sampled_BT = _padded([item.sampled_logprobs for item in items], length).to(device)
        old_BT = sampled_BT
        if settings.importance_cap is not None:
            old_BT = _padded([item.own_logprobs for item in items], length).to(device)
        return policy_loss(
            scores.logprobs_BT,
            old_BT,
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
            sampler_logprobs_BT=sampled_BT,
            importance_cap=settings.importance_cap,
            weights_B=torch.tensor(weights, device=device),
            num_sequences=num_sequences,
            num_tokens=num_tokens,
        )


def _has_signal(trajectory: Trajectory) -> bool:
    return trajectory.advantage != 0.0 and trajectory.weight != 0.0


def _episode_of(trajectory: Trajectory) -> str:
    """`<episode>#<turn>` is a sequence of an episode in `window` mode."""
    return trajectory.trajectory_id.partition("#")[0]


def _padded(rows: Sequence[torch.Tensor], length: int) -> torch.Tensor:
    padded = torch.zeros(len(rows), length)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
    return padded
