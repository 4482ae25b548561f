"""The tables as Parquet or Lance: a client without any code of this program gets the answers that the store gives."""

import hashlib
import json
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import duckdb
import pyarrow.parquet as pq
import pytest
from episode_samples import make_episode
from export_samples import make_state

from osworld_pipeline.columns import SCHEMA_VERSION, doc_of
from osworld_pipeline.datasets.exporters.lake import STORED, TABLES, LakeFormat, export_lake
from osworld_pipeline.domain.group import RolloutGroup
from osworld_pipeline.domain.replay import TrainedRow
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import DatasetError, DependencyError, StoreError
from osworld_pipeline.runs.upkeep.upkeep import compact_store
from osworld_pipeline.store import TrajectoryStore
from osworld_pipeline.tables.catalog import fresh_views
from osworld_pipeline.tables.checkpoints import read_checkpoint_row, upsert_checkpoint
from osworld_pipeline.tables.views import DERIVED

FORMS: tuple[LakeFormat, ...] = ("parquet", "lance")


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> StateDir:
    """A partly compacted state with rows in every view."""
    state = make_state(tmp_path_factory.mktemp("lake") / "it's var")
    compact_store(state, min_parts=1)
    store = TrajectoryStore(state)
    episode = make_episode("e-new", checkpoint_id="gspo-1", task_id="a")
    store.write_episodes("later", [episode])
    store.write_groups(
        "later", [RolloutGroup(group_id="g", task_id="a", stage_key="gspo-1", update=0, episodes=(episode,))], []
    )
    known = TrainedRow(row_id="r1", kind="demonstration", task_id="a", source_dataset="sft_clean", licence="mit")
    upsert_checkpoint(state, replace(read_checkpoint_row(state, "sft-1"), sources=(known,)))
    return state


@pytest.fixture(scope="module", params=FORMS)
def exported(request: pytest.FixtureRequest, state: StateDir, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param) / "it's out"
    export_lake(state, folder, form=request.param, max_file_bytes=1)
    # An export may be carried elsewhere.
    return folder.rename(folder.with_name("it's elsewhere"))


def plain_client(folder: Path) -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect()
    if manifest(folder)["kind"] == "lance":
        import lance

        for name in TABLES:
            connection.register(f"{STORED}{name}", lance.dataset(folder / f"{name}.lance"))
    else:
        connection.execute("SET file_search_path = '" + str(folder).replace("'", "''") + "'")
    connection.execute((folder / "views.sql").read_text())
    return connection


def manifest(folder: Path) -> dict:
    return json.loads((folder / "export.json").read_text())


def answers(connection: duckdb.DuckDBPyConnection, view: str) -> tuple[list[tuple], Counter[str]]:
    columns = connection.execute(f"DESCRIBE {view}").fetchall()
    rows = connection.execute(f"FROM {view}").fetchall()
    return [(name, kind) for name, kind, *_ in columns], Counter(map(repr, rows))


def test_every_view_answers_a_plain_client_as_the_store_does(state: StateDir, exported: Path) -> None:
    names = (*TABLES, *DERIVED)
    with fresh_views(state) as ours, plain_client(exported) as theirs:
        for name in names:
            assert answers(theirs, name) == answers(ours, name), name
        filled = [name for name in names if sum(answers(ours, name)[1].values())]
    assert set(DERIVED) <= set(filled)


def test_the_manifest_describes_each_file(exported: Path) -> None:
    reported = manifest(exported)
    assert reported["schema_version"] == SCHEMA_VERSION
    files = {file["file"]: file for table in reported["tables"].values() for file in table["files"]}
    there = {str(path.relative_to(exported)) for path in exported.rglob("*") if path.is_file()}
    assert there == {*files, "export.json", "views.sql"}
    for name, file in files.items():
        data = (exported / name).read_bytes()
        assert (file["bytes"], file["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())
    for table in reported["tables"].values():
        assert sum(file["rows"] or 0 for file in table["files"]) == table["rows"]
    assert reported["tables"]["steps"]["rows"] == 16


def test_the_manifest_names_licences_sources_and_checkpoints(exported: Path) -> None:
    reported = manifest(exported)
    assert reported["licences"] == [
        {"table": "episodes", "source": "agentnet", "licence": "mit", "rows": 1},
        {"table": "episodes", "source": "this pipeline", "licence": None, "rows": 7},
        {"table": "raw_counts", "source": "sft_clean", "licence": "mit", "rows": 1},
        {"table": "replay_buffer", "source": "sft_clean", "licence": "mit", "rows": 2},
    ]
    assert reported["counts"]["num_unknown_licence"] == 7
    assert [row["checkpoint_id"] for row in reported["checkpoints"]] == ["gspo-1", "sft-1"]
    assert reported["checkpoints"][0]["parent_id"] == "sft-1"


def test_the_same_rows_make_the_same_parquet_export_with_documented_columns(state: StateDir, tmp_path: Path) -> None:
    for name in ("one", "two"):
        assert export_lake(state, tmp_path / name, own_licence="apache-2.0").num_unknown_licence == 0
    reported = manifest(tmp_path / "one")
    assert reported == manifest(tmp_path / "two")
    assert [row["licence"] for row in reported["licences"] if row["source"] == "this pipeline"] == ["apache-2.0"]
    schema = pq.read_schema(tmp_path / "one" / "episodes" / "00000.parquet")
    assert doc_of(schema.field("num_steps")) != ""
    assert schema.metadata[b"osworld_schema_version"] == str(SCHEMA_VERSION).encode()


def test_a_state_without_rows_is_refused(tmp_path: Path) -> None:
    (tmp_path / "var").mkdir()
    with pytest.raises(DatasetError, match=r"no table in .* has a row"):
        export_lake(StateDir(tmp_path / "var"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_without_pylance_the_extra_is_named(state: StateDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lance", None)
    with pytest.raises(DependencyError, match="install the extra 'lance'"):
        export_lake(state, tmp_path / "out", form="lance")
    assert list(tmp_path.iterdir()) == []


def test_an_existing_file_in_the_target_folder_is_kept(state: StateDir, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    with pytest.raises(StoreError, match="exists: choose another folder"):
        export_lake(state, tmp_path / "out")
    assert (tmp_path / "out" / "mine").read_text() == "x"


KILLED = """
import os, signal, sys
from pathlib import Path
from osworld_pipeline.datasets.exporters.lake import export_lake
from osworld_pipeline.domain.group import RolloutGroup
from osworld_pipeline.domain.state import StateDir
left = int(sys.argv[3])
def on_progress(done, total):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
export_lake(StateDir(Path(sys.argv[1])), Path(sys.argv[2]), form=sys.argv[4], on_progress=on_progress)
"""


def test_a_killed_export_is_absent_and_the_next_one_is_whole(state: StateDir, tmp_path: Path) -> None:
    form: LakeFormat = "lance"  # which commits each table by itself
    command = [sys.executable, "-c", KILLED, str(state.root), str(tmp_path / "out"), "3", form]
    assert subprocess.run(command, timeout=60, check=False, capture_output=True).returncode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    assert len(list(tmp_path.iterdir())) == 1
    export_lake(state, tmp_path / "out", form=form)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    with plain_client(tmp_path / "out") as client:
        assert client.execute("SELECT count(*) FROM episodes").fetchall() == [(8,)]
