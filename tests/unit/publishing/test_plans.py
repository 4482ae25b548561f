"""A publication states its licences, hashes and lineage. Without a licence, nothing is published."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from episode_samples import make_episode
from export_samples import make_state

from osworld_pipeline.datasets.exporters.huggingface import export_huggingface
from osworld_pipeline.datasets.exporters.lake import export_lake
from osworld_pipeline.datasets.exporters.selection import Selection
from osworld_pipeline.domain.checkpoint import Checkpoint, Stage
from osworld_pipeline.domain.episode import EpisodePurpose
from osworld_pipeline.domain.replay import TrainedRow
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import DatasetError
from osworld_pipeline.publishing.checkpoint import plan_checkpoint
from osworld_pipeline.publishing.dataset import plan_dataset
from osworld_pipeline.publishing.publication import Publication
from osworld_pipeline.publishing.results import plan_results
from osworld_pipeline.store import TrajectoryStore
from osworld_pipeline.tables.catalog import rebuild_catalog
from osworld_pipeline.tables.checkpoints import find_checkpoint, upsert_checkpoint
from osworld_pipeline.tables.owned import write_table

"""Typer uses, while it is imported, what a later click will not have."""
WEIGHTS = b"the weights"


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> StateDir:
    """gspo-1 descends from sft-1, which learned from a source under MIT, and that from an external base."""
    state = make_state(tmp_path_factory.mktemp("publish") / "var")
    upsert_checkpoint(state, checkpoint("base-1", Stage.EXTERNAL))
    known = TrainedRow(row_id="aa", kind="demonstration", task_id="a", source_dataset="sft_clean", licence="MIT")
    upsert_checkpoint(state, checkpoint("sft-1", Stage.SFT, parent_id="base-1", sources=(known,)))
    upsert_checkpoint(state, checkpoint("gspo-1", Stage.GSPO_PHASE1, parent_id="sft-1", recipe={"name": "demo"}))
    folder = state.checkpoints / "gspo-1"
    (folder / "optimizer").mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "checkpoint.json", "trainer_state.json", "optimizer/0.pt"):
        (folder / name).write_text("{}")
    (folder / "model.safetensors").write_bytes(WEIGHTS)
    TrajectoryStore(state).write_episodes(
        "eval", [make_episode("e1", checkpoint_id="gspo-1", stage_key="eval-gspo-1-k", task_id="a")]
    )
    rebuild_catalog(state)
    return state


def checkpoint(name: str, stage: Stage, **changes: Any) -> Checkpoint:
    fields: dict[str, Any] = {
        "checkpoint_id": name, "stage": stage, "parent_id": None, "path": f"checkpoints/{name}", "num_updates": 3,
        "recipe_digest": f"recipe of {name}", "data_digest": f"data of {name}", "code_version": "c0ffee",
        "weights_digest": hashlib.sha256(WEIGHTS).hexdigest(),
    }  # fmt: skip
    return Checkpoint(**(fields | changes))


def card(plan: Publication) -> str:
    return text(plan, "README.md")


def text(plan: Publication, path: str) -> str:
    content = next(file.content for file in plan.all_files() if file.path == path)
    assert isinstance(content, bytes)
    return content.decode()


@pytest.fixture(scope="module")
def lake(state: StateDir, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lake") / "out"
    export_lake(state, folder, own_licence="apache-2.0")
    return folder


def test_rows_without_a_licence_are_refused_by_name(state: StateDir, tmp_path: Path) -> None:
    export_huggingface(state, tmp_path / "out", configs=["episodes"])
    with pytest.raises(
        DatasetError, match=r"no licence: this pipeline \(7 rows of episodes\); export again with --own"
    ):
        plan_dataset(tmp_path / "out")


@pytest.mark.parametrize("licence", ["unknown", "Unknown ", None])
def test_an_unknown_licence_counts_as_no_licence(tmp_path: Path, licence: str | None) -> None:
    state = StateDir(tmp_path / "var")
    episode = make_episode("e1", purpose=EpisodePurpose.IMPORT, source_dataset="found", licence=licence or "")
    TrajectoryStore(state).write_episodes("import", [episode])
    export_lake(state, tmp_path / "out", own_licence="mit")
    with pytest.raises(DatasetError, match=r"nothing is pushed.*found \(1 rows of episodes\)"):
        plan_dataset(tmp_path / "out")


@pytest.mark.parametrize(("licence", "refused"), [("mit", ""), (None, r"distill \(1 rows of raw_counts\)")])
def test_an_export_of_only_tasks_needs_the_licences_of_their_sources(
    tmp_path: Path, licence: str | None, refused: str
) -> None:
    state = StateDir(tmp_path / "var")
    write_table(state, "union_tasks", [{"task_id": "a", "domain": "os", "instruction": "Do a."}])
    export_lake(state, tmp_path / "first")
    with pytest.raises(DatasetError, match=r"no recorded source \(1 rows of union_tasks\)"):
        plan_dataset(tmp_path / "first")
    source = {"source_dataset": "distill", "licence": licence, "is_present": True, "num_records": 1}
    write_table(state, "raw_counts", [source, {"source_dataset": "absent", "is_present": False}])
    export_lake(state, tmp_path / "second")
    if not refused:
        assert plan_dataset(tmp_path / "second").licence == "mit"
        return
    with pytest.raises(DatasetError, match=refused):
        plan_dataset(tmp_path / "second")


def test_a_dataset_of_licensed_rows_keeps_the_exporters_card(state: StateDir, tmp_path: Path) -> None:
    export_huggingface(state, tmp_path / "out", selection=Selection(licences=("mit",)))
    plan = plan_dataset(tmp_path / "out")
    assert (plan.licence, plan.repo_type) == ("mit", "dataset")
    reported = card(plan)
    assert reported.startswith('---\nlicense: "mit"\nconfigs: [{"config_name": "episodes"')
    assert reported.count("## Licences") == 1
    assert "| steps | agentnet | mit | 1 |" in reported
    assert "## Columns" in reported
    shard = tmp_path / "out" / "data" / "replay-00000-of-00001.parquet"
    assert hashlib.sha256(shard.read_bytes()).hexdigest() in reported


def test_a_lake_states_licences_checkpoints_and_their_digests(lake: Path) -> None:
    plan = plan_dataset(lake)
    assert plan.licence == "apache-2.0, mit"
    reported = card(plan)
    assert reported.startswith('---\nlicense: ["apache-2.0", "mit"]\n')
    assert "| gspo-1 | gspo_phase1 | sft-1 | recipe of gspo-1 | data of gspo-1 |" in reported
    record = json.loads(text(plan, "publication.json"))
    assert record["data_digest"] == plan.data_digest
    assert "episodes/00000.parquet" in record["files"]
    assert [file.sha256 for file in plan.all_files()] == [file.sha256 for file in plan_dataset(lake).all_files()]


def test_an_export_with_a_changed_file_is_refused(state: StateDir, tmp_path: Path) -> None:
    export_lake(state, tmp_path / "out", own_licence="mit")
    with (tmp_path / "out" / "steps" / "00000.parquet").open("ab") as file:
        file.write(b"x")
    with pytest.raises(DatasetError, match="was changed since the export"):
        plan_dataset(tmp_path / "out")


@pytest.mark.parametrize("content", ["", "[]", '{"kind": "merged"}', '{"kind": "huggingface"}'])
def test_a_folder_that_is_not_an_export_of_rows_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "export.json").write_text(content)
    with pytest.raises(DatasetError, match="export"):
        plan_dataset(tmp_path)


def test_a_checkpoint_states_what_it_descends_from_and_was_trained_on(state: StateDir) -> None:
    plan = plan_checkpoint(state, "gspo-1", licence="Apache-2.0", source_licences={"base-1": "apache-2.0"})
    assert [file.path for file in plan.files] == ["config.json", "model.safetensors", "tokenizer.json", "recipe.json"]
    reported = card(plan)
    assert reported.startswith('---\nlicense: "apache-2.0"\nlibrary_name: "transformers"\n')
    assert "| demonstration fine tuned | sft_clean | MIT | 1 |" in reported
    assert "| weights | base-1 | apache-2.0 | 1 |" in reported
    assert "| sft-1 | sft | 3 | recipe of sft-1 | data of sft-1 |" in reported
    assert "| eval-gspo-1-k | 100.0% |" in reported
    assert hashlib.sha256(WEIGHTS).hexdigest() in reported
    record = json.loads(text(plan, "publication.json"))
    assert [one["checkpoint_id"] for one in record["ancestors"]] == ["sft-1", "base-1"]
    assert (record["checkpoint"]["code_version"], record["evaluations"][0]["num_valid"]) == ("c0ffee", 1)


def test_a_checkpoint_without_a_licence_is_refused(state: StateDir) -> None:
    with pytest.raises(DatasetError, match="gspo-1 has no licence: name it with --licence"):
        plan_checkpoint(state, "gspo-1", licence=None)
    with pytest.raises(DatasetError, match=r"no licence: base-1 \(1 rows of weights\); name it with --source-licence"):
        plan_checkpoint(state, "gspo-1", licence="mit")


def test_the_recorded_licence_of_an_ancestors_weights_needs_no_statement(tmp_path: Path) -> None:
    state = make_state(tmp_path / "var")
    upsert_checkpoint(state, checkpoint("base-1", Stage.BASE, path="/models/q", licence="apache-2.0"))
    upsert_checkpoint(state, checkpoint("sft-1", Stage.SFT, parent_id="base-1"))
    folder = state.checkpoints / "sft-1"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(WEIGHTS)
    rebuild_catalog(state)
    assert "| weights | base-1 | apache-2.0 | 1 |" in card(plan_checkpoint(state, "sft-1", licence="mit"))


def test_training_data_without_a_licence_is_refused_by_name(tmp_path: Path) -> None:
    state = make_state(tmp_path / "var")
    unknown = TrainedRow(row_id="ab", kind="demonstration", task_id="a", source_dataset="scraped")
    upsert_checkpoint(state, checkpoint("sft-1", Stage.SFT, sources=(unknown, replace(unknown, row_id="ac"))))
    with pytest.raises(DatasetError, match=r"no licence: scraped \(2 rows of demonstration fine tuned\)"):
        plan_checkpoint(state, "gspo-1", licence="mit")


def test_weights_that_differ_from_the_recorded_ones_are_refused(state: StateDir) -> None:
    found = find_checkpoint(state, "gspo-1")
    assert found is not None
    upsert_checkpoint(state, replace(found, checkpoint_id="gspo-2", weights_digest="other"))
    with pytest.raises(DatasetError, match="are not those that were recorded for gspo-2"):
        plan_checkpoint(state, "gspo-2", licence="mit", source_licences={"base-1": "mit"})


def result(**changes: Any) -> dict[str, Any]:
    fields = {
        "checkpoint": "gspo-1", "suite": {"name": "heldout", "digest": "d" * 64}, "results": [{}, {}],
        "stage_key": "eval-k", "success_rate": 0.5, "interval": {"low": 0.1, "high": 0.9, "confidence": 0.95},
        "num_valid": 2, "num_success": 1, "num_faults": 0, "max_turns": 5, "seeds": [0], "desktops": "image/grader 1",
    }  # fmt: skip
    return fields | changes


def test_results_are_one_table_under_the_named_licence(tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text(json.dumps(result()))
    (tmp_path / "two.json").write_text(json.dumps(result(checkpoint="sft-1", success_rate=None, interval=None)))
    plan = plan_results(tmp_path, licence="cc-by-4.0")
    assert [file.path for file in plan.files] == ["results/one.json", "results/two.json"]
    assert "| gspo-1 | heldout (dddddddddddd) | 50.0% | 10.0% - 90.0% (95%) | 1/2 |" in card(plan)
    assert "| sft-1 | heldout (dddddddddddd) | unknown |" in card(plan)
    with pytest.raises(DatasetError, match="has no licence"):
        plan_results(tmp_path, licence=None)


def test_a_file_that_is_not_a_result_is_refused(tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text('{"checkpoint": "x"}')
    with pytest.raises(DatasetError, match="is not a result file \\(it has no 'suite'\\)"):
        plan_results(tmp_path, licence="mit")


def test_a_dry_run_prints_what_would_be_pushed_and_needs_no_token(
    lake: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from osworld_pipeline.cli import app

    app(["publish", "dataset", str(lake), "--repo", "org/data", "--dry-run"], standalone_mode=False)
    reported = capsys.readouterr().out
    assert reported.startswith("would push to the dataset org/data, apache-2.0, mit:\n")
    assert "episodes/00000.parquet" in reported
    assert "## Hashes" in reported
