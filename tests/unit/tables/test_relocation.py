"""A state folder is copied, moved and mounted: its catalog answers any DuckDB client from its present place."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import duckdb
import pytest
from episode_samples import make_episode

from osworld_pipeline.columns import PART_TABLES
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.runs.upkeep.upkeep import compact_store
from osworld_pipeline.store import TrajectoryStore
from osworld_pipeline.tables.catalog import rebuild_catalog
from osworld_pipeline.tables.query import run_query
from osworld_pipeline.tables.views import DERIVED

COUNT = "SELECT count(*), count(DISTINCT episode_id) FROM episodes"


@pytest.fixture
def original(tmp_path: Path) -> StateDir:
    state = StateDir(tmp_path / "it's the original")
    store = TrajectoryStore(state)
    for part in ("a", "b"):
        store.write_episodes(part, [make_episode(part)])
    compact_store(state, min_parts=1)
    rebuild_catalog(state)
    return state


@pytest.fixture
def copy(original: StateDir, tmp_path: Path) -> StateDir:
    """A copy with two episodes; the original has a third one since then."""
    state = StateDir(tmp_path / "elsewhere" / "copy")
    shutil.copytree(original.root, state.root)
    TrajectoryStore(original).write_episodes("c", [make_episode("c")])
    return state


def ask(path: Path | str, sql: str = COUNT, *, is_read_only: bool = True) -> list[tuple]:
    with duckdb.connect(str(path), read_only=is_read_only) as connection:
        return connection.execute(sql).fetchall()


@pytest.mark.parametrize("is_read_only", [True, False])
def test_a_copy_answers_a_plain_client_from_its_own_parts(
    original: StateDir, copy: StateDir, is_read_only: bool
) -> None:
    assert ask(original.catalog, is_read_only=is_read_only) == [(3, 3)]
    assert ask(copy.catalog, is_read_only=is_read_only) == [(2, 2)]
    TrajectoryStore(copy).write_episodes("d", [make_episode(name) for name in ("d1", "d2")])
    assert ask(copy.catalog, is_read_only=is_read_only) == [(4, 4)]
    assert run_query(copy, COUNT).rows == [(4, 4)]


def test_a_moved_state_answers_in_every_view(original: StateDir, tmp_path: Path) -> None:
    moved = StateDir(tmp_path / "moved")
    original.root.rename(moved.root)
    for view in (*PART_TABLES, *DERIVED):
        ask(moved.catalog, f"FROM {view}")
    assert ask(moved.catalog) == [(2, 2)]


def test_the_working_directory_and_a_relative_path_do_not_matter(copy: StateDir, original: StateDir) -> None:
    script = "import duckdb, sys; print(duckdb.connect(sys.argv[1], read_only=True).execute(sys.argv[2]).fetchall())"
    for folder in (original.root, copy.root, copy.root.parent, Path("/")):
        path = os.path.relpath(copy.catalog, folder)
        command = [sys.executable, "-c", script, path, COUNT]
        said = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=True)
        assert said.stdout == "[(2, 2)]\n", folder


def test_a_state_behind_a_link_answers(copy: StateDir, tmp_path: Path) -> None:
    (tmp_path / "mount").symlink_to(copy.root)
    assert ask(tmp_path / "mount" / copy.catalog.name) == [(2, 2)]


def test_an_attached_catalog_needs_a_variable_with_its_folder_and_the_error_names_it(copy: StateDir) -> None:
    with duckdb.connect() as connection:
        connection.execute(f"ATTACH '{copy.catalog}' AS osworld (READ_ONLY)")
        with pytest.raises(duckdb.Error, match="SET VARIABLE osworld_state"):
            connection.execute("SELECT count(*) FROM osworld.episodes")
        connection.execute(f"SET VARIABLE osworld_state = '{copy.root}'")
        assert connection.execute("SELECT count(*) FROM osworld.episodes").fetchall() == [(2,)]


def test_no_view_holds_a_path(original: StateDir) -> None:
    (text,) = ask(original.catalog, "SELECT string_agg(sql, ' ') FROM duckdb_views() WHERE NOT internal")[0]
    assert str(original.root).replace("'", "''") not in text
    assert str(original.root.parent) not in text
