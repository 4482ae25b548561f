"""Runs commands of `osworld-pipeline` that evaluate and collect, in a folder where a state may grow."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.tables.query import run_query

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = ("--recipe", "smoke", "--set", "agent.max_response_tokens=8")
TOKEN = "the-endpoints-token"
LIMIT_S = 900


def with_instance_settings(folder: Path) -> Path:
    shutil.copy(ROOT / "dagster.yaml", folder)
    return folder


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "osworld_pipeline.cli", *arguments],
        cwd=folder,
        env={**os.environ, "DAGSTER_HOME": str(folder), "ENGINE_TOKEN": TOKEN, "COLUMNS": "400"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    process = start(folder, *arguments)
    try:
        output, errors = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def answer(folder: Path, *arguments: str) -> Any:
    done = run(folder, *arguments, "--json")
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def asked(folder: Path, sql: str) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in run_query(StateDir(folder / "var"), sql).rows]
