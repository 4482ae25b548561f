"""The state of each released version opens in this one: unchanged, and after its migration."""

from pathlib import Path

import pytest
from episode_samples import make_episode
from released_states import VERSIONS, unpack
from states.make import RECIPE

from osworld_pipeline.columns import OWNED_TABLES, PART_TABLES, SCHEMA_VERSION
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.runs.upkeep.migrate import migrate_state, plan_migration
from osworld_pipeline.runs.upkeep.upkeep import collect_garbage, compact_store, missing_blobs
from osworld_pipeline.store import TrajectoryStore
from osworld_pipeline.store.format_note import FORMAT
from osworld_pipeline.tables.catalog import rebuild_catalog
from osworld_pipeline.tables.query import run_query
from osworld_pipeline.tables.questions.cookbook import COOKBOOK
from osworld_pipeline.tables.views import DERIVED

TABLES = (*PART_TABLES, *OWNED_TABLES)


@pytest.fixture(params=VERSIONS)
def state(request: pytest.FixtureRequest, tmp_path: Path) -> StateDir:
    return unpack(request.param, tmp_path / "var")


def rows_of(state: StateDir, columns: dict[str, list[str]]) -> dict[str, list[str]]:
    """The rows of each table, as sorted texts."""
    found: dict[str, list[str]] = {}
    for table, names in columns.items():
        chosen = ", ".join(f'"{name}"' for name in names)
        found[table] = sorted(map(str, run_query(state, f"SELECT {chosen} FROM {table}").rows))
    return found


def columns_of(state: StateDir) -> dict[str, list[str]]:
    """The columns of each table in its catalog. A later version may have more."""
    return {table: run_query(state, f"FROM {table} LIMIT 0").columns for table in TABLES}


def call(*arguments: str) -> None:
    from osworld_pipeline.cli import app

    app(list(arguments), standalone_mode=False)


def test_a_released_state_has_records_of_every_kind(state: StateDir) -> None:
    assert [table for table, rows in rows_of(state, columns_of(state)).items() if not rows] == []
    assert list(state.blobs.glob("packs/**/*.zip"))
    assert list(state.trajectories.glob("*/compacted/g*.parquet"))
    assert list(state.trajectories.glob("episodes/eval-*.parquet")), "small parts"


def test_a_released_state_is_read_with_its_own_catalog_and_with_a_new_one(state: StateDir) -> None:
    columns = columns_of(state)
    before = rows_of(state, columns)
    rebuild_catalog(state)
    assert rows_of(state, columns) == before
    for view in DERIVED:
        run_query(state, f"SELECT * FROM {view}")
    assert missing_blobs(state) == {}
    store = TrajectoryStore(state)
    read = [episode for part in store.read_parts(store.existing_parts()).values() for episode in part]
    assert len(read) == len(before["episodes"])
    images = {step.screenshot_sha256 for episode in read for step in episode.steps}
    assert all(store.read_blob(sha256).startswith(b"\x89PNG") for sha256 in images)


def test_a_released_state_answers_the_cookbook_and_gets_reports(
    state: StateDir, capsys: pytest.CaptureFixture[str]
) -> None:
    rebuild_catalog(state)
    for question in COOKBOOK:
        call("cookbook", question.name, "--format", "json", "--state", str(state.root))
    call("report", "--all", *RECIPE, "--state", str(state.root))
    pages = [Path(line) for line in capsys.readouterr().out.splitlines() if line.endswith(".html")]
    assert len(pages) > 4
    assert all(page.is_file() for page in pages)


def test_a_migrated_state_has_the_same_rows_and_nothing_old(state: StateDir) -> None:
    columns = columns_of(state)
    before = rows_of(state, columns)
    planned = plan_migration(state)
    assert migrate_state(state) == planned
    after = plan_migration(state)
    assert (after.is_due, after.parts.format) == (False, FORMAT)
    assert rows_of(state, columns) == before


@pytest.mark.parametrize("is_migrated", [False, True])
def test_writers_and_upkeep_work_in_a_released_state(state: StateDir, is_migrated: bool) -> None:
    if is_migrated:
        migrate_state(state)
    else:
        rebuild_catalog(state)
    (before,) = run_query(state, "SELECT count(*) FROM episodes").rows
    TrajectoryStore(state).write_episodes("new", [make_episode("new")])
    assert compact_store(state, min_parts=1, retired_grace_s=0, cold_days=0).num_parts > 1
    collect_garbage(state, grace_s=-1, retired_grace_s=-1)
    assert run_query(state, "SELECT count(*) FROM episodes").rows == [(before[0] + 1,)]
    assert set(plan_migration(state).parts.versions["episodes"]) == {str(SCHEMA_VERSION)}
