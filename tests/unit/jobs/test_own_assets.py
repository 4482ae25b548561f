"""An asset of a user that takes tables of the catalog, as docs/dagster.md shows it."""

import re
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pytest

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import TableError
from osworld_pipeline.tables.catalog import rebuild_catalog
from osworld_pipeline.tables.owned import write_table
from resources.catalog_tables import CatalogTables, catalog_tables
from resources.state import StateResource

PAGE = Path(__file__).parents[3] / "docs/dagster.md"


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    state = StateDir(tmp_path)
    row = {"row_id": "r1", "task_id": "a", "source_dataset": "sft_clean", "source_path": "x", "source_line": 7}
    write_table(state, "replay_buffer", [row | {"reward": 1.0, "is_reward_assumed": True, "num_steps": 1}])
    rebuild_catalog(state)
    return state


def load(state: StateDir, name: str, metadata: dict[str, Any] | None = None) -> pa.Table:
    return CatalogTables(state).load_input(dg.build_input_context(asset_key=name, definition_metadata=metadata or {}))


def test_the_example_of_the_page_counts_the_rows_of_a_table_and_of_a_view(state: StateDir) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    module: dict[str, Any] = {}
    exec(example, module)
    done = (
        module["defs"]
        .resolve_implicit_global_asset_job_def()
        .execute_in_process(
            asset_selection=[dg.AssetKey("replay_and_scores")],
            run_config={"resources": {"state": {"config": {"path": str(state.root)}}}},
        )
    )
    (event,) = done.get_asset_materialization_events()
    counted = {name: value.value for name, value in event.materialization.metadata.items()}
    assert counted == {"demonstrations": 1, "scores": 0}


def test_an_input_is_the_table_of_its_name_another_table_or_a_query(state: StateDir) -> None:
    assert load(state, "replay_buffer").column("row_id").to_pylist() == ["r1"]
    assert load(state, "evaluations", {"table": "evals"}).num_rows == 0
    asked = load(state, "anything", {"sql": "SELECT 1 + count(*) AS n FROM replay_buffer"})
    assert asked.to_pylist() == [{"n": 2}]


def test_a_table_that_does_not_exist_is_named(state: StateDir) -> None:
    with pytest.raises(TableError, match='no "such" table'):
        load(state, 'no "such" table')


def test_an_asset_cannot_be_stored_in_the_tables(state: StateDir) -> None:
    @dg.asset(io_manager_key="tables")
    def mine() -> int:
        return 1

    resources = {"tables": catalog_tables, "state": StateResource(path=str(state.root))}
    done = dg.materialize([mine], resources=resources, raise_on_error=False)
    (failure,) = [event.step_failure_data for event in done.all_events if event.is_step_failure]
    assert failure.error is not None
    cause = failure.error.cause or failure.error
    assert "are read-only for mine" in cause.message
