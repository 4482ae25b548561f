"""Checkpoints made elsewhere: their ids, which sources are refused, and that they must stay unchanged."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from checkpoint_samples import lay_down, make_checkpoint, write_evaluation

from osworld_pipeline.domain.checkpoint import Stage
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import DependencyError, StoreError, TableError
from osworld_pipeline.recipes import load_recipe
from osworld_pipeline.runs.checkpoints.endpoints import Endpoint
from osworld_pipeline.runs.checkpoints.external import add_checkpoint, find_or_add, require_unchanged
from osworld_pipeline.runs.checkpoints.ids import read_checkpoint
from osworld_pipeline.runs.checkpoints.registry import all_checkpoints, newest_checkpoint
from osworld_pipeline.runs.evaluate.champion import choose_champion
from osworld_pipeline.runs.evaluate.evaluate import policy_of
from osworld_pipeline.runs.evaluate.plan import plan_evaluation
from osworld_pipeline.runs.job import Policy
from osworld_pipeline.tables.checkpoints import find_checkpoint

RECIPE = load_recipe("smoke")
ENDPOINT = "https://models.example/v1#big-model"


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    return StateDir(tmp_path / "var")


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path) -> Path:
    """A model that the test may change."""
    return shutil.copytree(tiny_folder, tmp_path / "model")


def test_folder_becomes_a_checkpoint_with_a_card_and_a_row_and_nothing_is_copied(state: StateDir, folder: Path) -> None:
    checkpoint = add_checkpoint(state, str(folder))
    assert (checkpoint.stage, checkpoint.parent_id, checkpoint.path) == (Stage.EXTERNAL, None, str(folder))
    assert checkpoint.checkpoint_id.startswith("external-")
    assert len(checkpoint.checkpoint_id) == len("external-") + 12
    assert read_checkpoint(state, checkpoint.checkpoint_id) == checkpoint
    assert find_checkpoint(state, checkpoint.checkpoint_id) == checkpoint
    assert [path.name for path in (state.checkpoints / checkpoint.checkpoint_id).iterdir()] == ["checkpoint.json"]
    require_unchanged(checkpoint.checkpoint_id, folder)


def test_the_licence_in_the_model_card_of_a_folder_is_recorded_and_may_be_added_later(
    state: StateDir, folder: Path
) -> None:
    first = add_checkpoint(state, str(folder))
    assert first.licence is None
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    again = add_checkpoint(state, str(folder))
    assert (again.checkpoint_id, again.licence) == (first.checkpoint_id, "apache-2.0")
    assert find_checkpoint(state, first.checkpoint_id) == again


def test_folder_that_was_added_is_found_again_without_torch(state: StateDir, folder: Path) -> None:
    added = add_checkpoint(state, str(folder))
    again = (
        "import sys; from pathlib import Path\n"
        "from osworld_pipeline.domain.state import StateDir\n"
        "from osworld_pipeline.runs.checkpoints.external import add_checkpoint\n"
        "found = add_checkpoint(StateDir(Path(sys.argv[1])), sys.argv[2])\n"
        "print(found.checkpoint_id, *{'torch', 'transformers'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", again, str(state.root), str(folder)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() == [added.checkpoint_id]


def test_same_model_in_another_folder_is_the_same_checkpoint_with_the_new_path(
    state: StateDir, folder: Path, tmp_path: Path
) -> None:
    first = add_checkpoint(state, str(folder))
    moved = folder.rename(tmp_path / "moved")
    second = add_checkpoint(state, str(moved))
    assert second.checkpoint_id == first.checkpoint_id
    assert [one.path for one in all_checkpoints(state)] == [str(moved)]


def test_folder_that_has_changed_or_is_gone_is_refused_at_its_next_use(state: StateDir, folder: Path) -> None:
    checkpoint_id = add_checkpoint(state, str(folder)).checkpoint_id
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "note": "another one"}))
    with pytest.raises(StoreError, match=f"{folder} has changed since it was added as {checkpoint_id}"):
        require_unchanged(checkpoint_id, folder)
    assert add_checkpoint(state, str(folder)).checkpoint_id != checkpoint_id
    shutil.rmtree(folder)
    with pytest.raises(StoreError, match=f"{checkpoint_id} is missing: there is no folder {folder}"):
        require_unchanged(checkpoint_id, folder)


def test_folder_that_cannot_be_loaded_is_refused_in_one_sentence(state: StateDir, folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())

    def refusal() -> str:
        with pytest.raises(StoreError) as refused:
            add_checkpoint(state, str(folder))
        return str(refused.value)

    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": "maybe"}))
    assert "config.json has a value that is not valid for qwen3_vl" in refusal()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").unlink()
    assert "no model.safetensors" in refusal()
    (folder / "tokenizer.json").unlink()
    assert f"{folder} has no tokenizer.json" in refusal()
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    assert "holds a model of type llama, and only qwen3_vl can be loaded here" in refusal()
    (folder / "config.json").unlink()
    assert "no config.json that names its model_type" in refusal()
    shutil.rmtree(folder)
    assert f"there is no folder {folder}" in refusal()
    assert all_checkpoints(state) == []


@pytest.fixture
def adapter(folder: Path, tmp_path: Path) -> Path:
    """An adapter as peft saves it on the model: no processor, no config.json."""
    from osworld_pipeline.agent.adapters import ADAPTER, Base
    from osworld_pipeline.recipes.schema import LoraSection
    from osworld_pipeline.training.model import load_model
    from osworld_pipeline.training.weights import lora

    section, model = LoraSection(rank=2, alpha=8.0), load_model(folder)
    lora.add_adapters(model, section, seed=1)
    factors = {name: tensor + 0.1 for name, tensor in model.state_dict().items() if f".{ADAPTER}." in name}
    place = tmp_path / "adapter-of-mine"
    lora.save_adapter(place, model, factors, section, Base(folder=folder, digest=""), place=place)
    (place / "base.json").unlink()
    config = json.loads((place / "adapter_config.json").read_text())
    (place / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": str(folder)}))
    return place


def test_adapter_that_peft_saved_is_a_checkpoint_where_its_base_is_known(
    state: StateDir, folder: Path, adapter: Path
) -> None:
    from osworld_pipeline.agent.processor import load_processor
    from osworld_pipeline.runs.rollouts.engine_kinds import EngineRequest, open_engine

    checkpoint = find_or_add(state, str(adapter))
    assert (checkpoint.stage, checkpoint.path) == (Stage.EXTERNAL, str(adapter))
    assert checkpoint.weights_digest != add_checkpoint(state, str(folder)).weights_digest
    require_unchanged(checkpoint.checkpoint_id, adapter)
    recipe, where = policy_of(Policy.of(checkpoint), RECIPE, state)
    assert where is not None
    engine: Any = open_engine(EngineRequest(recipe=recipe, folder=where, processor=load_processor(where)))
    factors = [tensor for name, tensor in engine._model.state_dict().items() if ".lora_B." in name]
    assert factors
    assert all(bool((tensor == 0.1).all()) for tensor in factors), "it is sampled with the adapter on it"


def test_adapter_that_has_changed_or_whose_base_is_gone_is_refused(
    state: StateDir, folder: Path, adapter: Path
) -> None:
    checkpoint_id = add_checkpoint(state, str(adapter)).checkpoint_id
    config = adapter / "adapter_config.json"
    written = config.read_text()
    config.write_text(json.dumps({**json.loads(written), "lora_alpha": 9}))
    with pytest.raises(StoreError, match=f"{adapter} has changed since it was added as {checkpoint_id}"):
        require_unchanged(checkpoint_id, adapter)
    config.write_text(written)
    require_unchanged(checkpoint_id, adapter)
    shutil.rmtree(folder)
    with pytest.raises(
        StoreError, match=f"the base checkpoint of the adapter {adapter} is missing: there is no folder {folder}"
    ):
        require_unchanged(checkpoint_id, adapter)
    with pytest.raises(
        StoreError, match=f"the base checkpoint of the adapter {adapter} is missing: there is no folder {folder}"
    ):
        add_checkpoint(state, str(adapter))


def test_model_of_the_hub_is_added_as_the_folder_of_its_commit(state: StateDir, folder: Path) -> None:
    asked: list[tuple[str, str | None]] = []

    def fetch(repo_id: str, revision: str | None) -> Path:
        asked.append((repo_id, revision))
        return folder

    pinned = add_checkpoint(state, "hub:owner/name@v2", fetch=fetch)
    newest = add_checkpoint(state, "hub:owner/name", fetch=fetch)
    assert asked == [("owner/name", "v2"), ("owner/name", None)]
    assert pinned.path == str(folder)
    assert newest == pinned


@pytest.mark.parametrize("source", ["hub:name", "hub:a/b/c", "hub:/name", "hub:owner/"])
def test_source_that_does_not_name_a_model_of_the_hub_is_refused(state: StateDir, source: str) -> None:
    with pytest.raises(StoreError, match=r"is written hub:OWNER/NAME\[@REVISION\]"):
        add_checkpoint(state, source)


def test_error_of_the_hub_is_reported_unchanged(state: StateDir) -> None:
    def fetch(repo_id: str, revision: str | None) -> Path:
        raise DependencyError("the hub did not provide owner/name")

    with pytest.raises(DependencyError, match="the hub did not provide"):
        add_checkpoint(state, "hub:owner/name", fetch=fetch)


def test_endpoint_is_identified_by_its_address_and_model_alone(state: StateDir) -> None:
    checkpoint = add_checkpoint(state, ENDPOINT)
    assert (checkpoint.path, checkpoint.weights_digest) == (ENDPOINT, "")
    assert add_checkpoint(state, "https://models.example/v1/#big-model") == checkpoint
    assert add_checkpoint(state, "https://models.example/v1#other").checkpoint_id != checkpoint.checkpoint_id


@pytest.mark.parametrize("source", ["http://host/v1", "http:///v1#m", "https://host/v1?key=abc#m"])
def test_address_without_host_or_model_or_with_a_query_is_refused(state: StateDir, source: str) -> None:
    with pytest.raises(StoreError, match=r"is written http\(s\)://host/v1#model"):
        add_checkpoint(state, source)


def test_password_in_an_address_is_refused_and_not_repeated(state: StateDir) -> None:
    with pytest.raises(StoreError, match="set ENGINE_TOKEN") as refused:
        add_checkpoint(state, "https://me:hunter2@models.example/v1#m")
    assert "hunter2" not in str(refused.value)
    assert not state.checkpoints.exists()


def test_endpoint_is_sampled_with_any_engine_in_the_recipe_and_compared_under_the_same_key(
    state: StateDir,
) -> None:
    checkpoint = add_checkpoint(state, ENDPOINT)
    recipe, folder = policy_of(Policy.of(checkpoint), RECIPE, state)
    assert folder is None
    assert (recipe.engine.kind, recipe.engine.urls) == ("openai", ("https://models.example/v1",))
    assert recipe.engine.model == "big-model"
    assert plan_evaluation(recipe, "c").key == plan_evaluation(RECIPE, "c").key


def test_folder_is_sampled_by_the_engine_of_the_recipe(state: StateDir, folder: Path) -> None:
    inside = policy_of(Policy(checkpoint_id="sft-1", path="checkpoints/sft-1"), RECIPE, state)
    outside = policy_of(Policy(checkpoint_id="sft-1", path=str(folder)), RECIPE, state)
    assert inside == (RECIPE, state.checkpoints / "sft-1")
    assert outside == (RECIPE, folder)


def test_checkpoint_is_found_by_its_id_or_added_by_its_source(state: StateDir, folder: Path) -> None:
    lay_down(state, make_checkpoint("sft-1"))
    assert find_or_add(state, "sft-1").stage is Stage.SFT
    assert find_or_add(state, str(state.checkpoints / "sft-1")).stage is Stage.SFT
    assert find_or_add(state, str(folder)).stage is Stage.EXTERNAL
    assert find_or_add(state, ENDPOINT).path == ENDPOINT
    with pytest.raises(TableError, match="no checkpoint 'sft-2'"):
        find_or_add(state, "sft-2")


def test_newest_checkpoint_is_the_one_whose_card_was_written_last(state: StateDir) -> None:
    assert newest_checkpoint(state) is None
    lay_down(state, make_checkpoint("sft-1"))
    added = add_checkpoint(state, ENDPOINT)
    assert newest_checkpoint(state) == added


def test_checkpoint_trained_elsewhere_is_ranked_but_never_champion(state: StateDir) -> None:
    lay_down(state, make_checkpoint("sft-1"))
    external = add_checkpoint(state, ENDPOINT)
    write_evaluation(state, RECIPE, external.checkpoint_id, num_successes=2)
    write_evaluation(state, RECIPE, "sft-1", num_successes=1)
    assert choose_champion(state, RECIPE, current=None).checkpoint_id == "sft-1"


def test_address_that_is_parsed_and_written_is_unchanged() -> None:
    assert str(Endpoint.parse(ENDPOINT)) == ENDPOINT
