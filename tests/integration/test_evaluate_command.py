"""`evaluate` from end to end on real desktops: a folder from elsewhere, and a checkpoint of a bucket."""

import json
import shutil
from pathlib import Path

import pytest
from checkpoint_samples import make_checkpoint
from command_runs import LIMIT_S, SETTINGS, answer, asked, run, with_instance_settings
from s3_server import BUCKET, serve_s3

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.recipes import load_recipe
from osworld_pipeline.runs.checkpoints.ids import CARD, checkpoint_card, recipe_suite
from osworld_pipeline.tables.catalog import rebuild_catalog
from osworld_pipeline.tables.checkpoints import upsert_checkpoint
from osworld_pipeline.training.weights.weights_digest import weights_digest

pytestmark = [pytest.mark.slow, pytest.mark.desktop, pytest.mark.timeout(3 * LIMIT_S)]


@pytest.fixture
def here(tmp_path: Path) -> Path:
    return with_instance_settings(tmp_path)


def test_folder_from_elsewhere_is_evaluated_once_and_refused_when_it_has_changed(here: Path, tiny_folder: Path) -> None:
    model = shutil.copytree(tiny_folder, here / "model")
    options = ("evaluate", *SETTINGS, "--set", "evaluation.max_turns=1", "--checkpoint", str(model))
    result = answer(here, *options, "--output", str(here / "result.json"))
    assert json.loads((here / "result.json").read_text()) == result
    heldout = [item.task.task_id for item in recipe_suite(load_recipe("smoke")).heldout]
    assert (result["tasks"], result["max_turns"], result["num_valid"]) == (heldout, 1, len(heldout))
    assert [row["task_id"] for row in result["results"]] == heldout
    before = asked(here, "SELECT episode_id, started_at FROM evals WHERE stage = 'external' ORDER BY 1")
    assert len(before) == len(heldout)
    assert answer(here, *options) == result
    assert asked(here, "SELECT episode_id, started_at FROM evals WHERE stage = 'external' ORDER BY 1") == before
    (model / "config.json").write_text((model / "config.json").read_text() + "\n")
    refused = run(here, "evaluate", *SETTINGS, "--checkpoint", result["checkpoint"], "--max-turns", "2")
    assert refused.returncode == 1
    assert f"{model} has changed since it was added as {result['checkpoint']}" in refused.stderr


def test_machine_that_has_only_the_bucket_evaluates_a_checkpoint(
    here: Path, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    origin = StateDir(tmp_path_factory.mktemp("origin") / "var")
    checkpoint = make_checkpoint("sft-000000000001", weights_digest=weights_digest(tiny_folder))
    shutil.copytree(tiny_folder, origin.root / checkpoint.path)
    (origin.root / checkpoint.path / CARD).write_text(json.dumps(checkpoint_card(checkpoint)))
    upsert_checkpoint(origin, checkpoint)
    rebuild_catalog(origin)
    options = ("--max-tasks", "1", "--max-turns", "1", "--checkpoint", checkpoint.checkpoint_id)
    with serve_s3() as s3, pytest.MonkeyPatch.context() as patch:
        for name, value in s3.environment.items():
            patch.setenv(name, value)
        patch.setenv("OSWORLD_STATE_REMOTE", f"s3://{BUCKET}/runs")
        answer(here, "remote", "push", "--state", str(origin.root))
        shutil.rmtree(origin.root)
        result = answer(here, "evaluate", *SETTINGS, *options)
        assert (result["checkpoint"], result["num_valid"]) == (checkpoint.checkpoint_id, 1)
        # Only this command sends the new evaluation back to the bucket.
        assert answer(here, "remote", "push")["generation"] == 2
    assert asked(here, "SELECT stage, count(*) FROM evals GROUP BY ALL") == [("sft", 1)]
