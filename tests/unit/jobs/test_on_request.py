"""Jobs that a user requests once: finished work starts nothing."""

from pathlib import Path

import dagster as dg
import pytest
from checkpoint_samples import lay_down, make_checkpoint, write_evaluation

from jobs.on_request import EVALUATE_TASKS, evaluate_on_tasks
from osworld_pipeline.definitions import defs
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.recipes import load_recipe
from osworld_pipeline.tables.query import run_query


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from Dagster, where an op gets an asset's context
def test_evaluated_tasks_start_no_desktops_and_no_program(tmp_path: Path) -> None:
    state, checkpoint = StateDir(tmp_path), make_checkpoint("sft-000000000001")
    lay_down(state, checkpoint)
    write_evaluation(state, load_recipe("smoke"), checkpoint.checkpoint_id, num_successes=1)
    with dg.DagsterInstance.ephemeral() as instance:
        done = defs.resolve_job_def(EVALUATE_TASKS).execute_in_process(
            instance=instance,
            run_config={
                "loggers": {"console": {"config": {"log_level": "CRITICAL"}}},
                "ops": {evaluate_on_tasks.name: {"config": {"checkpoint_id": checkpoint.checkpoint_id}}},
                "resources": {
                    "recipe": {"config": {"name": "smoke"}},
                    "state": {"config": {"path": str(tmp_path)}},
                },
            },
        )
    assert done.success
    assert not state.logs.exists(), "an env server and a program write their logs there"
    assert run_query(state, "SELECT count(*) FROM evals").rows == [(2,)], "the catalog is made all the same"
