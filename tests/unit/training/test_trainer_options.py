import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from train_on_ranks import demonstrations, recipe_of, save
from training_samples import as_sampled, conversation, saved_weights

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.domain.trajectory import LazyImages, Trajectory, with_held_images
from osworld_pipeline.errors import RecipeError, TrainingError
from osworld_pipeline.recipes import Recipe
from osworld_pipeline.recipes.schema import LoraSection, TrainerSection
from osworld_pipeline.training.distributed.process_group import ProcessGroup
from osworld_pipeline.training.memory.fits import check_length
from osworld_pipeline.training.model import load_model
from osworld_pipeline.training.objective.score import score_trajectories
from osworld_pipeline.training.policy_trainer import open_gspo_trainer, open_sft_trainer
from osworld_pipeline.training.sft import SftTrainer
from osworld_pipeline.training.weights import lora
from osworld_pipeline.training.weights.checkpoint import latest_complete


def with_trainer(recipe: Recipe, **changes) -> Recipe:
    return recipe.model_copy(update={"trainer": recipe.trainer.model_copy(update=changes)})


def trained(folder: Path, recipe: Recipe) -> SftTrainer:
    trainer = open_sft_trainer(folder, recipe=recipe, process_group=ProcessGroup.alone())
    trainer.update(demonstrations(trainer.processor, 0))
    return trainer


def changed_parts(folder: Path, trainer: SftTrainer) -> set[str]:
    before = load_model(folder).state_dict()
    after = trainer.weights()
    moved = (name for name in before if not torch.equal(before[name], after[name]))
    return {"vision" if ".visual." in name else "language" for name in moved}


def test_the_vision_tower_is_frozen_unless_its_training_is_requested(tiny_folder: Path):
    recipe = recipe_of("plain")
    assert changed_parts(tiny_folder, trained(tiny_folder, recipe)) == {"vision", "language"}
    assert changed_parts(tiny_folder, trained(tiny_folder, with_trainer(recipe, train_vision=False))) == {"language"}
    assert TrainerSection().train_vision is False


def test_recomputed_activations_give_the_same_weights(tiny_folder: Path):
    recipe = recipe_of("plain")
    kept = trained(tiny_folder, recipe).weights()
    recomputed = trained(tiny_folder, with_trainer(recipe, activation_checkpointing=True)).weights()
    assert all(torch.equal(kept[name], recomputed[name]) for name in kept)


def test_packed_batches_train_as_padded_ones(tiny_folder: Path):
    recipe = with_trainer(recipe_of("plain"), max_tokens_per_batch=512)
    padded, packed = (trained(tiny_folder, with_trainer(recipe, batching=kind)) for kind in ("padded", "packed"))
    ours, theirs = padded.weights(), packed.weights()
    # Adam's first step is the sign of the gradient: a weight whose gradient is noise may go either way.
    differing = [(ours[name] - theirs[name]).abs() > 1e-5 for name in ours]
    assert sum(int(part.sum()) for part in differing) < 1e-3 * sum(part.numel() for part in differing)


def test_adapters_train_alone_and_are_saved_without_the_weights_under_them(
    tmp_path: Path, tiny_folder: Path, processor
):
    trainer = trained(tiny_folder, recipe_of("lora"))
    trainable = [name for name, param in trainer.model.named_parameters() if param.requires_grad]
    assert trainable
    assert all(".lora_" in name and name.startswith("model.language_model.layers.") for name in trainable)
    state = StateDir(tmp_path)
    save(state, trainer, "sft", {})
    folder = latest_complete(state, "sft")
    assert folder is not None
    trajectories = demonstrations(processor, 1)
    adapted = score_trajectories(trainer.model, processor, trajectories)
    plain = score_trajectories(load_model(folder), processor, trajectories)
    before = score_trajectories(load_model(tiny_folder), processor, trajectories)
    for one, other, start in zip(adapted, plain, before, strict=True):
        assert torch.equal(one, other)
        assert not torch.allclose(one, start, atol=1e-3)
    config = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (4, 8.0, "LORA")
    assert config["target_modules"] == sorted(LoraSection().target_modules)
    assert len(saved_weights(folder)) == len(trainable)
    assert not list(folder.glob("*.safetensors"))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft uses the old name
def test_peft_itself_loads_the_saved_adapter(tmp_path: Path, tiny_folder: Path, processor):
    peft = pytest.importorskip("peft", reason="needs the extra `lora`")
    trainer = trained(tiny_folder, recipe_of("lora"))
    save(StateDir(tmp_path), trainer, "sft", {})
    folder = latest_complete(StateDir(tmp_path), "sft")
    assert folder is not None
    loaded = peft.PeftModel.from_pretrained(load_model(tiny_folder), folder / "adapter").base_model.model
    trajectories = demonstrations(processor, 1)
    ours, theirs = (score_trajectories(one, processor, trajectories) for one in (trainer.model, loaded))
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(ours, theirs, strict=True))


def test_the_policy_without_its_adapters_equals_its_parent(tiny_folder: Path, processor):
    trainer = trained(tiny_folder, recipe_of("lora"))
    trajectories = demonstrations(processor, 1)
    parent = score_trajectories(load_model(tiny_folder), processor, trajectories)
    with lora.as_parent(trainer.model):
        bare = score_trajectories(trainer.model, processor, trajectories)
    again = score_trajectories(trainer.model, processor, trajectories)
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(bare, parent, strict=True))
    assert not all(torch.allclose(one, other, atol=1e-3) for one, other in zip(again, parent, strict=True))


def test_dropout_of_adapters_applies_to_fine_tuning_only(tiny_folder: Path, processor):
    """Otherwise dropout, and not the policy, would move the ratio of the first step away from 1."""
    recipe = recipe_of("lora", kl_coef=0.0, minibatches_per_update=1)
    assert recipe.trainer.lora is not None
    section = recipe.trainer.lora.model_copy(update={"dropout": 0.5})
    noisy = with_trainer(recipe, lora=section)
    tuned = {}
    for name, one in (("plain", recipe), ("noisy", noisy)):
        tuned[name] = trained(tiny_folder, one).weights()
    assert not all(torch.allclose(tuned["plain"][name], tuned["noisy"][name]) for name in tuned["plain"])
    trainers = [
        open_gspo_trainer(
            tiny_folder,
            reference_folder=tiny_folder,
            recipe=one,
            phase=one.gspo.phase1,
            process_group=ProcessGroup.alone(),
        )
        for one in (recipe, noisy)
    ]
    for trainer in trainers:
        for update in range(2):
            sampled = as_sampled(trainer.model, processor, demonstrations(processor, update), [1.0, -1.0, 0.5, 0.0])
            ours = [replace(one, policy_versions=(update,) * len(one.token_ids)) for one in sampled]
            metrics = trainer.update(ours)
            assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-6)
    plain, quiet = (trainer.weights() for trainer in trainers)
    assert all(torch.equal(plain[name], quiet[name]) for name in plain)


def test_adapters_for_layers_that_do_not_exist_are_refused(tiny_folder: Path):
    recipe = recipe_of("lora")
    assert recipe.trainer.lora is not None
    nowhere = with_trainer(recipe, lora=recipe.trainer.lora.model_copy(update={"target_modules": ("nowhere",)}))
    with pytest.raises(RecipeError, match=r"trainer.lora.target_modules: no layer is named nowhere"):
        open_sft_trainer(tiny_folder, recipe=nowhere, process_group=ProcessGroup.alone())


def test_offloading_without_ranks_to_shard_over_is_refused(tiny_folder: Path):
    with pytest.raises(TrainingError, match=r"set trainer.num_processes to 2 or more"):
        open_sft_trainer(
            tiny_folder, recipe=with_trainer(recipe_of("plain"), cpu_offload=True), process_group=ProcessGroup.alone()
        )


def test_a_trajectory_above_the_budget_is_refused_when_it_is_collected(processor):
    trajectory = conversation(processor, 1, num_turns=3)
    num_tokens = len(trajectory.token_ids)
    check_length(trajectory, max_tokens=num_tokens)
    with pytest.raises(TrainingError, match=f"trajectory t1 has {num_tokens} tokens, more than the {num_tokens - 1} "):
        check_length(trajectory, max_tokens=num_tokens - 1)


def test_images_are_read_on_first_access_and_sent_once(processor):
    blobs = {"a": b"one", "b": b"two"}
    reads: list[str] = []

    def read(sha256: str) -> bytes:
        reads.append(sha256)
        return blobs[sha256]

    lazy = LazyImages(read, ["a", "b", "a"])
    trajectory = Trajectory(trajectory_id="t", task_id="t", token_ids=(1, 2), response_mask=(0, 1), images=lazy)
    assert len(trajectory.images) == 3
    assert reads == []
    assert trajectory.images[1] == b"two"
    assert reads == ["b"]
    assert trajectory.images == (b"one", b"two", b"one")
    reads.clear()
    first, second = with_held_images([trajectory, replace(trajectory, trajectory_id="u")])
    assert reads == ["a", "b"]
    assert first.images[0] is second.images[2]


def test_an_episode_has_the_same_weight_in_both_context_modes(tiny_folder: Path, processor):
    """Two equal windows share their episode's weight, so that they count as one sequence."""
    model = load_model(tiny_folder)
    good, bad = as_sampled(model, processor, [conversation(processor, 1), conversation(processor, 2)], [1.0, -1.0])
    windows = [replace(good, trajectory_id=f"t1#{turn}") for turn in range(2)]
    recipe = recipe_of("plain", kl_coef=0.0, minibatches_per_update=1, max_grad_norm=1e9, entropy_coef=0.0)
    norms = []
    for trajectories in ([good, bad], [*windows, bad]):
        trainer = open_gspo_trainer(
            tiny_folder,
            reference_folder=tiny_folder,
            recipe=recipe,
            phase=recipe.gspo.phase1,
            process_group=ProcessGroup.alone(),
        )
        norms.append(trainer.update(trajectories)["grad_norm"])
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)


def test_sequences_of_one_episode_stay_in_one_minibatch(tiny_folder: Path, processor):
    model = load_model(tiny_folder)
    trajectories = as_sampled(
        model, processor, [conversation(processor, number, num_turns=1) for number in range(4)], [1.0, 1.0, -1.0, -1.0]
    )
    windows = [replace(item, trajectory_id=f"e{index // 2}#{index % 2}") for index, item in enumerate(trajectories)]
    recipe = recipe_of("plain", kl_coef=0.0, minibatches_per_update=4)
    trainer = open_gspo_trainer(
        tiny_folder,
        reference_folder=tiny_folder,
        recipe=recipe,
        phase=recipe.gspo.phase1,
        process_group=ProcessGroup.alone(),
    )
    assert trainer.update(windows)["num_optimizer_steps"] == 2.0
