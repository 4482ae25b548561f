"""Checkpoints that are an adapter and a reference to its base: phases continue from them, they move with their state
folder, and parts that do not belong together are one clear error."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from adapter_samples import adapted_recipe, factors, fine_tuned, open_phase, saved, without_adapters
from safetensors.torch import load_file, save_file
from train_on_ranks import demonstrations, rollouts
from training_samples import CORPUS, SMALL, saved_weights

from osworld_pipeline.agent.adapters import find_adapter, whole_weights_folder
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import RecipeError, StoreError
from osworld_pipeline.training.distributed.process_group import ProcessGroup
from osworld_pipeline.training.model import load_model
from osworld_pipeline.training.objective.score import score_trajectories
from osworld_pipeline.training.policy_trainer import open_sft_trainer
from osworld_pipeline.training.tiny.model import build_tiny_checkpoint
from osworld_pipeline.training.weights import lora
from osworld_pipeline.training.weights.checkpoint import TrainerState, keep_milestone, save_final
from osworld_pipeline.training.weights.manifest import verify_checkpoint
from osworld_pipeline.training.weights.weights_digest import weights_digest


@pytest.fixture
def state(tmp_path: Path, tiny_folder: Path) -> StateDir:
    """A state folder with its base in it."""
    state = StateDir(tmp_path / "var")
    shutil.copytree(tiny_folder, base_of(state))
    return state


def base_of(state: StateDir) -> Path:
    return state.checkpoints / "base-1"


def final(trainer, state: StateDir, name: str) -> Path:
    trainer_state = TrainerState(
        checkpoint_id=name, parent_id=None, num_updates=trainer.num_updates, recipe={}, data_digest=""
    )
    return save_final(state, trainer, trainer_state)


def test_a_checkpoint_names_its_base_and_holds_no_other_weights(state: StateDir):
    folder = fine_tuned(base_of(state), adapted_recipe(), state)
    adapter = find_adapter(folder)
    assert adapter is not None
    assert adapter.base_folder == base_of(state).resolve()
    assert (adapter.rank, adapter.alpha) == (4, 8.0)
    assert adapter.base_digest == weights_digest(base_of(state))
    recorded = json.loads((folder / "adapter" / "base.json").read_text())
    assert recorded == {"base_folder": "../../../base-1", "base_digest": adapter.base_digest}
    assert whole_weights_folder(folder) == base_of(state).resolve()
    assert (find_adapter(base_of(state)), whole_weights_folder(base_of(state))) == (None, base_of(state))
    verify_checkpoint(folder, is_required=True)


def test_sft_and_both_phases_continue_the_same_adapter(state: StateDir, processor):
    recipe = adapted_recipe(kl_coef=0.0, max_logprob_diff=100.0)
    sft = fine_tuned(base_of(state), recipe, state)
    first = open_phase(sft, recipe)
    assert all(torch.equal(tensor, start) for tensor, start in zip(*factor_pairs(first, sft), strict=True))
    first.update(rollouts(sft, processor, 0))
    phase1 = final(first, state, "phase1")
    second = open_phase(phase1, recipe)
    assert all(torch.equal(tensor, start) for tensor, start in zip(*factor_pairs(second, phase1), strict=True))
    second.update(rollouts(phase1, processor, 1))
    phase2 = final(second, state, "phase2")
    for folder in (sft, phase1, phase2):
        adapter = find_adapter(folder)
        assert adapter is not None
        assert adapter.base_folder == base_of(state).resolve(), "the base of all of them is the one that was trained on"
    evaluated = score_trajectories(load_model(phase2, is_frozen=True), processor, demonstrations(processor, 3))
    trained = score_trajectories(second.model, processor, demonstrations(processor, 3))
    assert all(torch.equal(one, other) for one, other in zip(evaluated, trained, strict=True))


def factor_pairs(trainer, folder: Path) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    own, saved = factors(trainer.model), saved_weights(folder)
    names = {f"base_model.model.{name.replace('.default.weight', '.weight')}": name for name in own}
    assert names.keys() == saved.keys()
    return [own[names[name]] for name in saved], [saved[name] for name in saved]


def test_a_state_folder_can_be_moved(state: StateDir, tmp_path: Path, processor):
    recipe = adapted_recipe(kl_coef=0.0)
    folder = fine_tuned(base_of(state), recipe, state)
    before = score_trajectories(load_model(folder), processor, demonstrations(processor, 3))
    state.root.rename(tmp_path / "elsewhere")
    moved = StateDir(tmp_path / "elsewhere")
    folder = moved.root / folder.relative_to(state.root)
    after = score_trajectories(load_model(folder), processor, demonstrations(processor, 3))
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    trainer = open_sft_trainer(folder, recipe=recipe, process_group=ProcessGroup.alone(), num_updates=2)
    trainer.update(demonstrations(processor, 2))


def test_a_base_outside_the_state_folder_is_found_after_the_state_folder_moves(tmp_path: Path, tiny_folder: Path):
    state = StateDir(tmp_path / "var")
    folder = fine_tuned(tiny_folder, adapted_recipe(), state, num_updates=1)
    (tmp_path / "far" / "away").mkdir(parents=True)
    state.root.rename(tmp_path / "far" / "away" / "var")
    moved = tmp_path / "far" / "away" / "var" / folder.relative_to(state.root)
    assert whole_weights_folder(moved) == tiny_folder.resolve()
    load_model(moved)


def test_a_moved_base_is_found_at_the_path_in_base_json(state: StateDir, tmp_path: Path):
    recipe = adapted_recipe()
    folder = fine_tuned(base_of(state), recipe, state, num_updates=1)
    moved = base_of(state).rename(tmp_path / "moved")
    file = folder / "adapter" / "base.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "base_folder": str(moved)}))
    assert whole_weights_folder(folder) == moved.resolve()
    open_sft_trainer(folder, recipe=recipe, process_group=ProcessGroup.alone(), num_updates=1)


def test_a_missing_or_different_base_is_one_clear_error(state: StateDir):
    recipe = adapted_recipe()
    folder = fine_tuned(base_of(state), recipe, state, num_updates=1)
    base = base_of(state)
    shutil.rmtree(base)
    gone = rf"base checkpoint of the adapter .*update-0001/adapter is missing: there is no folder {base.resolve()}; res"
    with pytest.raises(StoreError, match=gone):
        load_model(folder)
    with pytest.raises(StoreError, match=gone):
        open_sft_trainer(folder, recipe=recipe, process_group=ProcessGroup.alone(), num_updates=1)
    build_tiny_checkpoint(base, SMALL.model_copy(update={"seed": 7}), CORPUS)
    another = (
        r"base-1 is not the base of the adapter .*update-0001/adapter: its weights have the digest [0-9a-f]{12}, and"
    )
    with pytest.raises(StoreError, match=another):
        load_model(folder)
    with pytest.raises(StoreError, match=another):
        open_phase(folder, recipe)


@pytest.mark.parametrize("changes", [{"rank": 8}, {"alpha": 4.0}, {"target_modules": ("q_proj", "v_proj")}])
def test_a_recipe_with_other_adapters_than_its_parents_is_refused(state: StateDir, changes):
    folder = fine_tuned(base_of(state), adapted_recipe(), state, num_updates=1)
    with pytest.raises(RecipeError, match=r"trainer.lora has rank .* continues with, has rank 4, alpha 8 and .*: set"):
        open_phase(folder, adapted_recipe(lora=changes))


def test_full_fine_tuning_from_an_adapter_is_refused(state: StateDir):
    recipe = adapted_recipe()
    folder = fine_tuned(base_of(state), recipe, state, num_updates=1)
    with pytest.raises(
        RecipeError, match=r"is an adapter of rank 4 and alpha 8, and the recipe has no trainer.lora: set"
    ):
        open_phase(folder, without_adapters(recipe))


def test_the_digest_covers_base_factors_and_scale(state: StateDir, tmp_path: Path):
    folder = fine_tuned(base_of(state), adapted_recipe(), state, num_updates=1)
    digest = weights_digest(folder)
    copy = shutil.copytree(folder, folder.with_name("update-0009"))
    assert weights_digest(copy) == digest
    config, base, weights = (copy / "adapter" / name for name in (
        "adapter_config.json", "base.json", "adapter_model.safetensors"))  # fmt: skip
    digests = {digest}
    for path, key, value in ((config, "lora_alpha", 9.0), (base, "base_digest", "0" * 64)):
        path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
        digests.add(weights_digest(copy))
    save_file({name: tensor + 1 for name, tensor in load_file(weights).items()}, weights)
    digests.add(weights_digest(copy))
    assert len(digests) == 4


def test_a_milestone_finds_the_base_from_its_own_folder(state: StateDir, processor):
    trainer = open_sft_trainer(base_of(state), recipe=adapted_recipe(), process_group=ProcessGroup.alone())
    trainer.update(demonstrations(processor, 0))
    partial = saved(trainer, state, "sft-1")
    milestone = keep_milestone(state, partial, "sft-1-u0001", lambda folder: {"c.json": {"d": weights_digest(folder)}})
    assert json.loads((milestone / "adapter" / "base.json").read_text())["base_folder"] == "../../base-1"
    assert json.loads((milestone / "c.json").read_text())["d"] == weights_digest(partial)
    final(trainer, state, "sft-1")
    assert not partial.exists()
    assert base_of(state).is_dir(), "what an adapter needs stays"
    verify_checkpoint(milestone, is_required=True)
    for folder in (milestone, state.checkpoints / "sft-1"):
        ours = score_trajectories(load_model(folder), processor, demonstrations(processor, 3))
        theirs = score_trajectories(trainer.model, processor, demonstrations(processor, 3))
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_a_checkpoint_of_an_earlier_version_is_loaded_from_its_merged_weights(state: StateDir, processor):
    """It holds merged weights with the adapter next to them."""
    recipe = adapted_recipe(kl_coef=0.0)
    folder = fine_tuned(base_of(state), recipe, state, num_updates=1)
    other = state.checkpoints / "other"
    build_tiny_checkpoint(other, SMALL.model_copy(update={"seed": 7}), CORPUS)
    old = state.checkpoints / "old"
    shutil.copytree(other, old)
    shutil.copytree(folder / "adapter", old / "adapter")
    assert find_adapter(old) is None
    assert weights_digest(old) == weights_digest(other)
    ours, theirs = (
        score_trajectories(load_model(one), processor, demonstrations(processor, 3)) for one in (old, other)
    )
    assert all(torch.equal(one, two) for one, two in zip(ours, theirs, strict=True))
    trainer = open_phase(old, recipe)
    assert not any(bool(tensor.any()) for name, tensor in factors(trainer.model).items() if ".lora_B." in name)


def test_a_run_that_an_earlier_version_started_is_not_resumed(state: StateDir):
    """Its partial checkpoints hold merged weights, which cannot be separated again."""
    recipe = adapted_recipe()
    folder = fine_tuned(base_of(state), recipe, state, num_updates=1)
    shutil.copyfile(base_of(state) / "model.safetensors", folder / "model.safetensors")
    refusal = r"update-0001 holds whole weights, as earlier versions .* cannot be resumed: remove .*sft.partial and run"
    with pytest.raises(StoreError, match=refusal):
        open_sft_trainer(folder, recipe=recipe, process_group=ProcessGroup.alone(), num_updates=1)


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"use_dora": True}, "use_dora = True: only plain LoRA can be loaded here"),
        ({"peft_type": "IA3"}, "peft_type = 'IA3': only plain LoRA"),
        ({"r": "many"}, "has no usable r and lora_alpha"),
    ],
)
def test_an_adapter_with_more_than_low_rank_factors_is_refused(state: StateDir, changes, refusal):
    folder = fine_tuned(base_of(state), adapted_recipe(), state, num_updates=1)
    config = folder / "adapter" / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **changes}))
    with pytest.raises(StoreError, match=refusal):
        find_adapter(folder)


def test_the_factors_of_an_adapter_are_loaded_before_the_weights_under_them(state: StateDir):
    """Ranks that read their shards of the base later need this."""
    folder = fine_tuned(base_of(state), adapted_recipe(), state, num_updates=1)
    adapter = find_adapter(folder)
    assert adapter is not None
    model = load_model(base_of(state)).to("meta")
    lora.add_saved_adapters(model, adapter)
    own, kept = factors(model), factors(load_model(folder))
    assert own.keys() == kept.keys()
    assert all(torch.equal(own[name], kept[name]) for name in kept)
    assert {name for name, param in model.named_parameters() if param.requires_grad} == set(own)


def test_a_folder_that_peft_wrote_is_loaded_with_the_base_that_it_names(state: StateDir, tmp_path: Path, processor):
    recipe = adapted_recipe()
    folder = fine_tuned(base_of(state), recipe, state, num_updates=1)
    foreign = shutil.copytree(folder / "adapter", tmp_path / "foreign")
    (foreign / "base.json").unlink()
    config = json.loads((foreign / "adapter_config.json").read_text())
    with pytest.raises(StoreError, match=r"the base model of the adapter .*foreign is not recorded: set base_model"):
        load_model(foreign)
    for name in (str(base_of(state)), "../var/checkpoints/base-1"):
        (foreign / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": name}))
        ours, theirs = (
            score_trajectories(load_model(one), processor, demonstrations(processor, 3)) for one in (foreign, folder)
        )
        assert all(torch.equal(one, two) for one, two in zip(ours, theirs, strict=True))
    (foreign / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": "absent/model"}))
    with pytest.raises(StoreError, match=r"is absent/model, which is neither a folder nor in the hub's cache: add it"):
        load_model(foreign)
