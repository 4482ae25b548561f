"""One command migrates a state of an older format to the present one, and a kill does not harm it; a newer state names
the version that reads it."""

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import orjson
import pytest
from episode_samples import make_episode
from old_parts import make_old

from osworld_pipeline.atomic_io import write_file
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import StoreError
from osworld_pipeline.object_store import RemoteNote, write_note
from osworld_pipeline.runs.upkeep.migrate import migrate_state, plan_migration
from osworld_pipeline.runs.upkeep.upkeep import compact_store
from osworld_pipeline.store import TrajectoryStore
from osworld_pipeline.store.format_note import FORMAT, NOTE, READ_SINCE, read_format
from osworld_pipeline.store.old_tokens import add_sequences
from osworld_pipeline.tables.catalog import rebuild_catalog
from osworld_pipeline.tables.query import run_query

TOKENS = "SELECT episode_id, sequence_index, token_ids FROM sequences ORDER BY ALL"
KILLED = """
import os, signal, sys
from pathlib import Path
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.runs.upkeep.migrate import migrate_state

left, replace = [int(sys.argv[2])], os.replace

def replace_or_die(*paths):
    if Path(paths[1]).is_relative_to(sys.argv[1]):  # not of a temporary catalog
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1
    replace(*paths)

os.replace = replace_or_die
migrate_state(StateDir(Path(sys.argv[1])))
"""


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    """A state with a compacted file and two small parts, one of which replaces a compacted one."""
    state = StateDir(tmp_path)
    store = TrajectoryStore(state)
    for name in ("a", "b", "c"):
        store.write_episodes(name, [make_episode(name)])
    rebuild_catalog(state)
    compact_store(state, min_parts=1, retired_grace_s=0)
    compact_store(state, min_parts=1, retired_grace_s=0)
    store.write_episodes("b", [make_episode("b", task_id="again")])
    store.write_episodes("d", [make_episode("d")])
    return state


def contents(state: StateDir) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in state.root.rglob("*") if path.is_file() and path.suffix != ".lock"}


def note(state: StateDir, **values: object) -> None:
    write_file(state.trajectories / NOTE, orjson.dumps(values))


def test_a_dry_run_reports_what_a_migration_does_and_changes_nothing(state: StateDir) -> None:
    make_old(state)
    before = contents(state)
    planned = plan_migration(state)
    assert contents(state) == before
    assert (planned.parts.num_old, planned.parts.format, planned.is_catalog_due) == (3, 1, False)
    assert planned.parts.versions["episodes"] == {"9": 3}
    assert migrate_state(state) == planned


def test_a_second_migration_changes_nothing(state: StateDir) -> None:
    make_old(state)
    migrate_state(state)
    before = contents(state)
    done = migrate_state(state)
    assert (done.is_due, done.parts.format) == (False, FORMAT)
    assert contents(state) == before


@pytest.mark.slow
def test_a_kill_at_any_rename_leaves_a_state_that_the_next_call_migrates(
    state: StateDir, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tokens = run_query(state, TOKENS).rows
    make_old(state)
    killed = True
    num_renames = 0
    while killed:
        copy = StateDir(shutil.copytree(state.root, tmp_path_factory.mktemp("killed") / "var"))
        words = [sys.executable, "-c", KILLED, str(copy.root), str(num_renames)]
        killed = subprocess.run(words, timeout=60).returncode == -signal.SIGKILL
        migrate_state(copy)
        assert plan_migration(copy).is_due is False
        assert run_query(copy, TOKENS).rows == tokens
        named = run_query(copy, "SELECT task_id FROM episodes WHERE episode_id = 'b'").rows
        assert named == [("again",)]
        num_renames += killed
    assert num_renames > 8


def test_readers_see_all_rows_while_old_files_are_rewritten(state: StateDir) -> None:
    tokens = run_query(state, TOKENS).rows
    make_old(state)
    add_sequences(state.trajectories)
    with subprocess.Popen([sys.executable, "-c", KILLED, str(state.root), "1000"]) as migrating:
        num_reads = 0
        while migrating.poll() is None:
            assert run_query(state, TOKENS).rows == tokens
            num_reads += 1
    assert (migrating.returncode, num_reads > 1) == (0, True)
    assert (read_format(state.trajectories).format, plan_migration(state).is_due) == (FORMAT, False)


def test_a_state_of_a_newer_format_names_the_version_that_it_needs(state: StateDir) -> None:
    note(state, format=FORMAT + 1, needs="9.1.0")
    for use in (TrajectoryStore, rebuild_catalog, plan_migration, migrate_state, lambda one: run_query(one, TOKENS)):
        with pytest.raises(
            StoreError, match=rf"of format {FORMAT + 1}.* up to {FORMAT}: install version 9\.1\.0 or newer"
        ):
            use(state)


def test_a_damaged_format_note_is_an_error_that_says_what_to_do(state: StateDir) -> None:
    (state.trajectories / NOTE).write_bytes(b"{")
    with pytest.raises(StoreError, match=r"format\.json is damaged .*: remove it"):
        TrajectoryStore(state)


def test_new_states_are_of_the_present_format_and_need_no_migration(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    assert plan_migration(state).is_due is False
    TrajectoryStore(state).write_episodes("a", [make_episode("a")])
    assert orjson.loads((state.trajectories / NOTE).read_bytes()) == {"format": FORMAT, "needs": READ_SINCE[FORMAT]}
    assert migrate_state(state).is_due is False


def test_a_catalog_of_another_version_is_built_again(state: StateDir) -> None:
    import duckdb

    with duckdb.connect(str(state.catalog)) as connection:
        connection.execute("DROP VIEW evals")
    assert plan_migration(state).is_catalog_due
    migrate_state(state)
    assert len(run_query(state, "FROM evals").rows) > 0
    assert not plan_migration(state).is_catalog_due


def test_a_cache_of_an_object_store_is_not_migrated(state: StateDir) -> None:
    write_note(state.root, RemoteNote(url="s3://bucket/runs", role="cache"))
    with pytest.raises(StoreError, match="is a cache: migrate the original state"):
        migrate_state(state)
