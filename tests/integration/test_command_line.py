"""The command line as a person uses it: each mistake gets one sentence that names the problem and how to fix it."""

import fcntl
import json
import shutil
import subprocess
import sys
from pathlib import Path

import duckdb
import pytest

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.recipes import recipe_names
from osworld_pipeline.tables.catalog import rebuild_catalog

ROOT = Path(__file__).resolve().parents[2]


def run(folder: Path, *arguments: str, input_text: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "osworld_pipeline.cli", *arguments]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=120, input=input_text, env={"COLUMNS": "400"}
    )


def test_query_before_any_demo_says_what_to_run(tmp_path: Path) -> None:
    done = run(tmp_path, "query", "SELECT 1")
    assert done.returncode == 1
    assert "osworld-pipeline demo --state" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_query_prints_json_and_csv(tmp_path: Path) -> None:
    rebuild_catalog(StateDir(tmp_path / "var"))
    assert json.loads(run(tmp_path, "query", "SELECT count(*) AS n FROM evals", "--format", "json").stdout) == [
        {"n": 0}
    ]
    assert run(tmp_path, "query", "SELECT count(*) AS n FROM tasks", "--format", "csv").stdout.split() == ["n", "0"]


def test_query_cannot_write_the_catalog(tmp_path: Path) -> None:
    rebuild_catalog(StateDir(tmp_path / "var"))
    done = run(tmp_path, "query", "DELETE FROM checkpoints")
    assert done.returncode == 1
    assert "read-only" in done.stderr


def test_catalog_held_open_for_writing_names_its_holder(tmp_path: Path) -> None:
    state = StateDir(tmp_path / "var")
    rebuild_catalog(state)
    with duckdb.connect(str(state.catalog)) as held:
        held.execute("SELECT 1")
        done = run(tmp_path, "query", "SELECT 1")
    assert done.returncode == 1
    assert "is open for writing in process" in done.stderr


def test_demo_with_an_unknown_recipe_lists_the_available_recipes(tmp_path: Path) -> None:
    done = run(tmp_path, "demo", "--recipe", "deno")
    assert done.returncode == 1
    assert f"no recipe named 'deno'; there are: {', '.join(recipe_names())}; or give a .toml file" in done.stderr


def test_demo_outside_a_project_says_how_to_make_one(tmp_path: Path) -> None:
    done = run(tmp_path, "demo", "--recipe", "smoke")
    assert done.returncode == 1
    assert f"there is no dagster.yaml in {tmp_path}: make this folder a project with" in done.stderr


def test_second_demo_in_the_same_state_names_the_first(tmp_path: Path) -> None:
    shutil.copy(ROOT / "dagster.yaml", tmp_path)
    (tmp_path / "var").mkdir()
    with (tmp_path / "var" / "demo.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("4711")
        lock.flush()
        done = run(tmp_path, "demo", "--recipe", "smoke")
    assert done.returncode == 1
    assert "another demo, train, backfill, evaluate or collect (process 4711) runs on" in done.stderr


def test_program_that_finds_no_env_server_names_the_address_and_exits_as_retryable(tmp_path: Path) -> None:
    from osworld_pipeline.recipes import load_recipe

    recipe = load_recipe("smoke").model_dump_json()
    servers = '{"urls": ["http://127.0.0.1:9"], "token": null, "num_replicas": 1}'
    job = f'{{"recipe": {recipe}, "state_root": "{tmp_path}", "servers": {servers}}}'
    command = [sys.executable, "-m", "osworld_pipeline.runs", "record_sources", "--print"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, input=job)
    assert done.returncode == 3
    assert "http://127.0.0.1:9" in done.stderr
    assert "env-server --provider local" in done.stderr
    assert not list(tmp_path.rglob("*.jsonl")), "nothing half-written is left"


@pytest.mark.parametrize("program", ["", "no_such_program"])
def test_unknown_program_is_refused_with_its_usage(tmp_path: Path, program: str) -> None:
    command = [sys.executable, "-m", "osworld_pipeline.runs", *filter(None, [program])]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, input="{}")
    assert done.returncode == 2
    assert "train_gspo" in done.stderr
