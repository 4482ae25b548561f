from pathlib import Path

import pytest
from training_samples import SMALL

from osworld_pipeline.agent.processor import load_processor
from osworld_pipeline.domain.checkpoint import Stage
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import DependencyError
from osworld_pipeline.recipes import load_recipe
from osworld_pipeline.recipes.schema import PretrainedModelSection
from osworld_pipeline.runs.base.make_base import main, resolve_pretrained, tokenizer_corpus
from osworld_pipeline.runs.checkpoints.ids import read_checkpoint
from osworld_pipeline.runs.job import StageJob
from osworld_pipeline.training.model import load_model


def make(tmp_path: Path, model) -> tuple[dict, list[dict], StateDir]:
    recipe = load_recipe("smoke").model_copy(update={"model": model})
    job = StageJob(
        recipe=recipe,
        state_root=tmp_path,
        stage=Stage.BASE,
        checkpoint_id="base-1",
        data_digest="d",
        run_ids={"dagster": "run-1"},
    )
    received: list[dict] = []
    return main(job, received.append), received, StateDir(tmp_path)


def test_a_tiny_base_is_made_once_with_its_card(tmp_path: Path):
    result, received, state = make(tmp_path, SMALL)
    checkpoint = read_checkpoint(state, "base-1")
    assert checkpoint is not None
    assert (checkpoint.stage, checkpoint.parent_id, checkpoint.num_updates) == (Stage.BASE, None, 0)
    assert checkpoint.path == "checkpoints/base-1"
    assert checkpoint.run_ids == {"dagster": "run-1"}
    assert result["weights_digest"] == checkpoint.weights_digest
    assert [message.kind for message in received] == ["progress", "progress"]
    load_model(tmp_path / checkpoint.path)
    load_processor(tmp_path / checkpoint.path)
    modified = (tmp_path / checkpoint.path / "model.safetensors").stat().st_mtime_ns
    assert make(tmp_path, SMALL)[0] == result
    assert (tmp_path / checkpoint.path / "model.safetensors").stat().st_mtime_ns == modified


def test_a_published_model_is_pointed_to_and_not_copied(tmp_path: Path, tiny_folder: Path):
    model = PretrainedModelSection(kind="pretrained", path=str(tiny_folder), dtype="float32")
    result, _, state = make(tmp_path, model)
    assert state.root / result["path"] == tiny_folder.resolve()
    assert [path.name for path in (state.checkpoints / "base-1").iterdir()] == ["checkpoint.json"]
    assert load_model(state.root / result["path"]).num_parameters() > 0


def test_a_model_that_is_neither_a_folder_nor_a_hub_id_is_refused_with_one_sentence():
    with pytest.raises(
        DependencyError, match=r"model.path '/no/such/model' is not a folder.* set model.path to its folder"
    ):
        resolve_pretrained(PretrainedModelSection(kind="pretrained", path="/no/such/model"))


def test_the_tokenizer_corpus_holds_the_training_tasks_and_no_held_out_task():
    recipe = load_recipe("smoke")
    corpus = list(tokenizer_corpus(recipe))
    assert corpus == list(tokenizer_corpus(recipe))
    assert sum("[Task]\n" in text for text in corpus) == recipe.suite.num_train * len(recipe.suite.families)
    assert any("<tool_call>" in text for text in corpus)
