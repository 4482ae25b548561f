"""An update that starts before its weights have reached the servers: the weights are sent while it scores, and it takes
no step before it was compared."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from training_samples import Scripted, as_sampled, conversation

from osworld_pipeline.domain.trajectory import Trajectory
from osworld_pipeline.errors import EngineError, TrainingError
from osworld_pipeline.recipes.schema import GspoSharedSection
from osworld_pipeline.training.model import load_model
from osworld_pipeline.training.update import GspoTrainer

SETTINGS = GspoSharedSection(learning_rate=1e-3, kl_coef=0.0, micro_batch_size=1)


@pytest.fixture
def stale(tiny_folder: Path, processor: Any) -> list[Trajectory]:
    """Trajectories that the weights of an earlier update sampled."""
    talks = [conversation(processor, number) for number in range(3)]
    sampled = as_sampled(load_model(tiny_folder), processor, talks, [1.0, -1.0, 0.5])
    return [replace(one, policy_versions=(-1,) * len(one.token_ids)) for one in sampled]


def canary_of(stale: Sequence[Trajectory]) -> Trajectory:
    return replace(stale[0], trajectory_id="canary", advantage=0.0, is_canary=True, policy_versions=None)


def weights_of(trainer: GspoTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.weights().items()}


def test_a_late_canary_and_transfers_between_passes_do_not_change_the_result_of_an_update(
    tiny_folder: Path, processor: Any, stale: list[Trajectory]
) -> None:
    early, late = (GspoTrainer(load_model(tiny_folder), processor, SETTINGS) for _ in range(2))
    before, sent = weights_of(late), list[dict[str, torch.Tensor]]()

    def receive(weights: Any) -> None:
        sent.append({name: tensor.clone() for name, tensor in weights})

    arrivals = Scripted([(2, receive), (2, receive), (99, receive)], lambda: [canary_of(stale)])
    expected = early.update([*stale, canary_of(stale)])
    metrics = late.update(stale, arrivals)
    assert arrivals.num_looks == 3, "before each pass"
    assert len(sent) == 3
    for one in sent:
        assert all(torch.equal(before[name], tensor) for name, tensor in one.items())
    assert metrics["canary_wait_s"] > 0
    for name in ("loss", "grad_norm", "trainer_sampler_logprob_diff", "num_canary_tokens"):
        assert metrics[name] == expected[name], name
    ours, theirs = weights_of(late), weights_of(early)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert any(not torch.equal(ours[name], before[name]) for name in before)


def test_a_failed_receiver_does_not_end_an_update_and_weights_that_never_arrive_do(
    tiny_folder: Path, processor: Any, stale: list[Trajectory]
) -> None:
    trainer = GspoTrainer(load_model(tiny_folder), processor, SETTINGS)
    before = weights_of(trainer)

    def refuse(weights: Any) -> None:
        next(iter(weights))
        raise EngineError("the server went away")

    def fail() -> Sequence[Trajectory]:
        raise EngineError("no server took the weights")

    with pytest.raises(EngineError, match="no server took the weights"):
        trainer.update(stale, Scripted([(1, refuse)], fail))
    with pytest.raises(TrainingError, match="its own weights sampled none of its tokens"):
        trainer.update(stale, Scripted([], tuple))
    after = weights_of(trainer)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert trainer.num_updates == 0
    assert trainer.update(stale, Scripted([(1, refuse)], lambda: [canary_of(stale)]))["is_skipped"] == 0.0
