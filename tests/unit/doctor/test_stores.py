"""The state folder as a doctor sees it: catalog, MLflow's database, locks."""

import fcntl
import json
import os
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from osworld_pipeline.atomic_io import locked
from osworld_pipeline.doctor.stores import (
    check_adapters,
    check_catalog,
    check_locks,
    check_mlflow_database,
    mlflow_revisions,
)
from osworld_pipeline.domain.finding import Status
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import StoreError
from osworld_pipeline.store.format_note import NOTE
from osworld_pipeline.tables.catalog import rebuild_catalog


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    return StateDir(tmp_path / "var")


def put_database(state: StateDir, revision: str) -> None:
    state.mlflow_db.parent.mkdir(parents=True)
    with closing(sqlite3.connect(state.mlflow_db)) as base:
        base.execute("CREATE TABLE alembic_version (version_num TEXT)")
        base.execute("CREATE TABLE runs (run_uuid TEXT)")
        base.execute("INSERT INTO alembic_version VALUES (?)", [revision])
        base.commit()


def head() -> str:
    known = mlflow_revisions()
    (revision,) = set(known) - {parent for parents in known.values() for parent in parents}
    return revision


def test_a_missing_state_folder_is_ok_and_is_not_created(state: StateDir) -> None:
    for found in (
        check_catalog("c", state),
        check_mlflow_database("m", state),
        check_adapters("a", state),
        check_locks("l", state),
    ):
        assert found.status == Status.OK
    assert not state.root.exists()


def test_a_valid_catalog_is_opened_and_a_damaged_one_is_reported_with_its_own_error(state: StateDir) -> None:
    rebuild_catalog(state)
    assert check_catalog("catalog", state).message.endswith("opens and has 0 episodes")
    state.catalog.write_bytes(b"no database" * 1000)
    found = check_catalog("catalog", state)
    assert found.status == Status.MISSING
    assert "cannot open" in found.message
    assert "nothing is lost" in found.remedy


@pytest.mark.parametrize(
    ("note", "words"), [('{"format": 99, "needs": "9.1.0"}', "install version 9.1.0 or newer"), ("{", "remove it")]
)
def test_a_new_catalog_is_not_the_remedy_for_a_state_that_cannot_be_read(
    state: StateDir, note: str, words: str
) -> None:
    rebuild_catalog(state)
    (state.trajectories / NOTE).write_text(note)
    found = check_catalog("catalog", state)
    assert (found.status, found.remedy) == (Status.MISSING, "")
    assert words in found.message


def test_mlflows_database_of_the_installed_schema_opens(state: StateDir) -> None:
    put_database(state, head())
    assert check_mlflow_database("m", state).status == Status.OK


def test_an_older_schema_has_the_upgrade_as_remedy_and_a_newer_one_is_reported_as_unsupported(state: StateDir) -> None:
    (older,) = mlflow_revisions()[head()]
    put_database(state, older)
    assert check_mlflow_database("m", state).remedy == f"mlflow db upgrade sqlite:///{state.mlflow_db}"
    with closing(sqlite3.connect(state.mlflow_db)) as base:
        base.execute("UPDATE alembic_version SET version_num = 'ffffffffffff'")
        base.commit()
    assert "does not support" in check_mlflow_database("m", state).message


def test_a_file_that_is_not_a_database_is_reported(state: StateDir) -> None:
    state.mlflow_db.parent.mkdir(parents=True)
    state.mlflow_db.write_bytes(b"x" * 10_000)
    found = check_mlflow_database("m", state)
    assert found.status == Status.MISSING
    assert "does not open" in found.message


def test_a_lock_in_use_names_its_process(state: StateDir) -> None:
    with locked(state.root / "catalog.lock", timeout_s=1.0, error=StoreError, what="it"):
        assert check_locks("locks", state).message == f"in use now: catalog.lock by process {os.getpid()}"
    assert check_locks("locks", state).message.startswith("no process holds a lock")


def put_adapter(state: StateDir, *, base: str) -> None:
    """Writes an adapter as a stage saves one; its factors are named in the header and their data is absent."""
    folder = state.checkpoints / "sft-1" / "adapter"
    folder.mkdir(parents=True)
    header = json.dumps({f"base_model.model.q_proj.lora_{one}.weight": {} for one in "AB"}).encode()
    (folder / "adapter_model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4}))
    (folder / "base.json").write_text(json.dumps({"base_folder": f"../../{base}", "base_digest": "d"}))


def test_an_adapter_whose_base_is_missing_is_reported(state: StateDir) -> None:
    put_adapter(state, base="base-1")
    found = check_adapters("adapters", state)
    assert found.status == Status.MISSING
    assert f"is missing: there is no folder {state.checkpoints / 'base-1'}" in found.message
    assert found.remedy.startswith("restore the base")
    (state.checkpoints / "base-1").mkdir()
    found = check_adapters("adapters", state)
    assert (found.status, found.message.startswith("1 adapter checkpoints in ")) == (Status.OK, True)


def test_checking_locks_takes_no_lock(state: StateDir) -> None:
    state.root.mkdir()
    (state.root / "demo.lock").touch()
    check_locks("locks", state)
    with (state.root / "demo.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_lock_kept_by_a_child_of_an_ended_process_is_reported_with_the_child(state: StateDir) -> None:
    state.root.mkdir()
    code = (
        "import fcntl, os, sys, time\n"
        "lock = open(sys.argv[1], 'w'); fcntl.flock(lock, fcntl.LOCK_EX)\n"
        "child = os.fork()\n"
        "if child == 0: time.sleep(60)\n"
        "print(child, flush=True); os._exit(0)\n"
    )
    command = [sys.executable, "-c", code, str(state.root / "demo.lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        try:
            parent.wait(10)
            deadline = time.monotonic() + 5.0
            while (found := check_locks("locks", state)).status == Status.OK and time.monotonic() < deadline:
                time.sleep(0.02)
            assert f"was locked by process {parent.pid}, which has ended" in found.message
            assert found.remedy == f"kill {child}"
        finally:
            os.kill(child, 9)
