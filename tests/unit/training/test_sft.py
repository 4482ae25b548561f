import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from training_samples import conversation

from osworld_pipeline.domain.replay import ReplayRow
from osworld_pipeline.domain.trajectory import Trajectory
from osworld_pipeline.errors import TrainingError
from osworld_pipeline.recipes.schema import SftSection
from osworld_pipeline.training.batch import build_batch
from osworld_pipeline.training.demonstrations import DemonstrationSet
from osworld_pipeline.training.model import load_model
from osworld_pipeline.training.objective.score import score_responses
from osworld_pipeline.training.sft import SftTrainer, batch_indices

SETTINGS = SftSection(num_updates=30, batch_size=3, learning_rate=3e-3, warmup_updates=3)


def batch_of(trajectories: list[Trajectory], update: int) -> list[Trajectory]:
    chosen = batch_indices(num_examples=len(trajectories), batch_size=SETTINGS.batch_size, seed=0, update=update)
    return [trajectories[index] for index in chosen]


@given(
    num_examples=st.integers(1, 20), batch_size=st.integers(1, 9), seed=st.integers(0, 99), num_epochs=st.integers(1, 4)
)
def test_every_example_comes_once_before_any_comes_again(
    num_examples: int, batch_size: int, seed: int, num_epochs: int
):
    num_updates = -(-num_epochs * num_examples // batch_size)
    drawn = [
        index
        for update in range(num_updates)
        for index in batch_indices(num_examples=num_examples, batch_size=batch_size, seed=seed, update=update)
    ]
    for epoch in range(num_epochs):
        assert sorted(drawn[epoch * num_examples : (epoch + 1) * num_examples]) == list(range(num_examples))


def test_batches_depend_on_seed_and_update_alone():
    arguments = {"num_examples": 50, "batch_size": 8, "update": 3}
    assert batch_indices(**arguments, seed=0) == batch_indices(**arguments, seed=0)
    assert batch_indices(**arguments, seed=0) != batch_indices(**arguments, seed=1)


def test_a_few_updates_lower_the_loss_on_the_demonstrations(model, processor):
    trajectories = [conversation(processor, number) for number in range(4)]
    trainer = SftTrainer(model, processor, SETTINGS)
    losses = [trainer.update(batch_of(trajectories, update))["loss"] for update in range(30)]
    assert losses[0] > 5.0
    assert losses[-1] < 2.0


def test_only_the_demonstrators_tokens_carry_the_loss(model, processor):
    trajectories = [conversation(processor, number, num_turns=number + 1) for number in range(3)]
    metrics = SftTrainer(load_model(model.name_or_path), processor, SETTINGS).update(trajectories)
    rows = score_responses(model, build_batch(processor, trajectories)).logprobs_BT.detach()
    num_tokens = sum(sum(trajectory.response_mask) for trajectory in trajectories)
    assert metrics["num_response_tokens"] == num_tokens
    assert metrics["loss"] == pytest.approx(-sum(float(row.sum()) for row in rows) / num_tokens, rel=1e-5)


def test_the_same_seed_gives_the_same_weights(tiny_folder, processor):
    trajectories = [conversation(processor, number) for number in range(4)]
    results = []
    for _ in range(2):
        model = load_model(tiny_folder)
        trainer = SftTrainer(model, processor, SETTINGS)
        for update in range(3):
            trainer.update(batch_of(trajectories, update))
        results.append(torch.cat([param.detach().flatten() for param in model.parameters()]))
    assert torch.equal(*results)


def test_a_learning_rate_that_makes_the_loss_not_finite_stops_the_run(model, processor):
    wild = SftSection(num_updates=50, batch_size=2, learning_rate=1e30, warmup_updates=0, max_grad_norm=1e30)
    trajectories = [conversation(processor, number) for number in range(2)]
    trainer = SftTrainer(model, processor, wild)
    trainer.update(trajectories)
    with pytest.raises(TrainingError, match=r"the (loss|gradient norm) is (nan|inf)"):
        trainer.update(trajectories)


def test_no_demonstrations_are_an_error(model, processor):
    with pytest.raises(TrainingError, match="no demonstrations to train on"):
        SftTrainer(model, processor, SETTINGS).update([])


def test_rows_that_cannot_be_rendered_are_left_out_and_counted():
    def render(row: ReplayRow) -> list[Trajectory]:
        if row.row_id == "b":
            raise ValueError("row b is too long")
        trajectory_id = f"demo:{row.row_id}"
        return [Trajectory(trajectory_id=trajectory_id, task_id="t", token_ids=(1, 2), response_mask=(0, 1), images=())]

    rows = [
        ReplayRow(
            row_id=row_id,
            task_id="t",
            original_task_id="t",
            source_dataset="s",
            reward=1.0,
            messages=(),
            image_sha256s=(),
        )
        for row_id in "cba"
    ]
    demonstrations = DemonstrationSet(rows, render)
    assert [item.trajectory_id for example in demonstrations for item in example] == ["demo:a", "demo:c"]
    assert demonstrations.skipped == ["row b is too long"]
