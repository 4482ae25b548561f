"""The state folder: its catalog, MLflow's database, the bases of its adapters, and the holders of its locks."""

import importlib.util
import json
import re
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from osworld_pipeline.agent.adapters import find_adapter
from osworld_pipeline.doctor.ports import command_of
from osworld_pipeline.doctor.programs import ask
from osworld_pipeline.domain.finding import Finding, Status
from osworld_pipeline.domain.shown_commands import pipeline_line
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import StoreError

CATALOG_LIMIT_S = 25.0
DATABASE_LIMIT_S = 5.0
_COUNT = "SELECT count(*) AS n FROM episodes"
_REVISION = re.compile(r"^(down_revision|revision)\b[^=]*=\s*(.+)$", re.MULTILINE)
_NAMES = re.compile(r"[\"'](\w+)[\"']")


def check_catalog(name: str, state: StateDir) -> Finding:
    """Runs the query command on the catalog."""
    if not state.catalog.is_file():
        return Finding(name=name, status=Status.OK, message=f"no catalog at {state.catalog} yet: the demo makes it")
    command = [sys.executable, "-m", "osworld_pipeline.cli", "query", _COUNT, "--json", "--state", str(state.root)]
    said = ask(command, limit_s=CATALOG_LIMIT_S)
    if said.status == 0:
        (row,) = json.loads(said.stdout)
        return Finding(name=name, status=Status.OK, message=f"{state.catalog} opens and has {row['n']:,} episodes")
    remedy = f"{pipeline_line(state, 'rebuild-catalog')} rebuilds it from the stored data; nothing is lost"
    try:
        error = json.loads(said.stderr.splitlines()[-1])["error"]
        message = str(error["message"])
        if error["type"] == StoreError.__name__:
            remedy = ""  # the error is about the parts, and its message names the command
    except (ValueError, KeyError, IndexError, TypeError):
        message = f"{state.catalog} cannot be queried ({said.stderr_tail})"
    return Finding(name=name, status=Status.MISSING, message=message, remedy=remedy)


def check_mlflow_database(name: str, state: StateDir) -> Finding:
    """Opens the database without MLflow, whose import takes seconds, and compares its schema with that of the installed
    MLflow."""
    path = state.mlflow_db
    if not path.is_file():
        return Finding(name=name, status=Status.OK, message=f"no MLflow database at {path} yet: the demo makes it")
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=DATABASE_LIMIT_S)) as base:
            row = base.execute("SELECT version_num FROM alembic_version").fetchone()
            num_runs = base.execute("SELECT count(*) FROM runs").fetchone()[0]
    except sqlite3.Error as error:
        return Finding(
            name=name,
            status=Status.MISSING,
            message=f"MLflow's database {path} does not open ({error})",
            remedy=f"stop its writers; if it is damaged: mv {path} {path}.damaged, and the next run starts a "
            "new database, without the earlier runs",
        )
    revision, known = str(row[0]) if row else "", mlflow_revisions()
    heads = set(known) - {parent for parents in known.values() for parent in parents}
    text = f"MLflow's database {path} has the schema {revision}"
    if known and revision not in known:
        remedy = "install the MLflow that wrote it, or a newer one"
        return Finding(
            name=name,
            status=Status.MISSING,
            message=f"{text}, which the installed MLflow does not support",
            remedy=remedy,
        )
    if known and revision not in heads:
        remedy = f"mlflow db upgrade {state.mlflow_uri}"
        return Finding(
            name=name,
            status=Status.MISSING,
            message=f"{text}, which is older than the installed MLflow's",
            remedy=remedy,
        )
    return Finding(name=name, status=Status.OK, message=f"MLflow's database {path} opens and has {num_runs:,} runs")


def mlflow_revisions() -> dict[str, set[str]]:
    """Each schema of the installed MLflow and its predecessors, read from its migrations; empty without MLflow."""
    spec = importlib.util.find_spec("mlflow")
    if spec is None or not spec.submodule_search_locations:
        return {}
    found: dict[str, set[str]] = {}
    folder = Path(next(iter(spec.submodule_search_locations))) / "store" / "db_migrations" / "versions"
    for path in folder.glob("*.py"):
        fields = dict(_REVISION.findall(path.read_text(errors="replace")))
        for revision in _NAMES.findall(fields.get("revision", "")):
            found[revision] = set(_NAMES.findall(fields.get("down_revision", "")))
    return found


def check_adapters(name: str, state: StateDir) -> Finding:
    """Checks that the base of each adapter checkpoint exists. The weights of bases are not read, because that is
    slow."""
    num_adapters = 0
    for folder in sorted(state.checkpoints.glob("[!.]*")):
        try:
            adapter = find_adapter(folder)
            if adapter is not None:
                num_adapters += 1
                _ = adapter.base_folder
        except StoreError as error:
            message, _, remedy = str(error).partition("; ")
            return Finding(
                name=name,
                status=Status.MISSING,
                message=message,
                remedy=remedy or f"remove {folder}, and train the checkpoint again",
            )
    text = f"{num_adapters:,} adapter checkpoints in {state.checkpoints}, and all their bases exist"
    return Finding(name=name, status=Status.OK, message=text if num_adapters else "no adapter checkpoints")


def check_locks(name: str, state: StateDir, proc: Path = Path("/proc")) -> Finding:
    """A lock ends with its process, unless a child process keeps it."""
    held = list(held_locks(state, proc))
    if not held:
        return Finding(name=name, status=Status.OK, message=f"no process holds a lock in {state.root}")
    for path, taker, present in held:
        if taker and not (proc / str(taker)).is_dir():
            heirs = ", ".join(f"process {pid} ({command_of(pid, proc)[:60]})" for pid in present)
            text = f"{path} was locked by process {taker}, which has ended; it is still held by {heirs}"
            return Finding(name=name, status=Status.MISSING, message=text, remedy=f"kill {present[0]}")
    names = ", ".join(f"{path.name} by process {taker or 'unknown'}" for path, taker, _ in held[:3])
    return Finding(name=name, status=Status.OK, message=f"in use now: {names}")


def held_locks(state: StateDir, proc: Path = Path("/proc")) -> Iterator[tuple[Path, int, list[int]]]:
    """Lock file, the process that took it (0 if outside of this container), and the processes that have it open."""
    try:
        rows = [line.split() for line in (proc / "locks").read_text().splitlines()]
    except OSError:
        return
    takers = {row[5].rpartition(":")[2]: int(row[4]) for row in rows if len(row) >= 8 and row[1] == "FLOCK"}
    for path in lock_files(state):
        # Compare only the inode, because on an overlay the kernel reports another device than stat does. _openers
        # uses samefile, so another file with this inode number gives no result.
        inode = str(path.stat().st_ino)
        present = _openers(path, proc) if inode in takers else []
        if present:
            yield path, max(0, takers[inode]), present


def lock_files(state: StateDir) -> Iterator[Path]:
    """The lock files directly in the state's main folders. Those of clients, datasets and the object store are not
    included."""
    for folder in (
        state.root,
        state.tables,
        state.trajectories,
        state.blobs,
        state.mlflow_db.parent,
        state.checkpoints,
    ):
        yield from sorted(folder.glob("*.lock"))
        yield from sorted(folder.glob(".*.lock"))


def _openers(path: Path, proc: Path) -> list[int]:
    found = []
    for folder in proc.glob("[0-9]*"):
        try:
            if any(link.samefile(path) for link in (folder / "fd").iterdir() if link.name.isdigit()):
                found.append(int(folder.name))
        except OSError:
            continue  # it has exited, or belongs to another user
    return sorted(found)
