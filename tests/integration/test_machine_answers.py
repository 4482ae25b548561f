"""The command line as a program uses it: with --json an answer is JSON, and so is an error, with its exit status."""

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from osworld_pipeline.doctor.roles import ROLES
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.tables.catalog import rebuild_catalog


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "osworld_pipeline.cli", *arguments]
    environment = {"COLUMNS": "400", "PATH": os.environ["PATH"]}
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, env=environment)


def answers(folder: Path, *calls: list[str]) -> list[Any]:
    """The answers of several calls with --json in one process, because most of a call's time is its imports."""
    code = (
        "import json, sys\n"
        "from functools import partial\n"
        "from osworld_pipeline.cli import app\n"
        "from osworld_pipeline.cli.machine import run_for_machine\n"
        "for call in json.loads(sys.argv[1]):\n"
        "    assert run_for_machine(partial(app, args=[*call, '--json'])) == 0, call\n"
        "    print('\\x1e', flush=True)\n"
    )
    command = [sys.executable, "-c", code, json.dumps(calls)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return [json.loads(text) for text in done.stdout.split("\x1e")[:-1]]


def error(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.stdout == ""
    reported = json.loads(done.stderr)["error"]
    assert reported["exit_status"] == done.returncode
    return reported


def test_answers_are_json(tmp_path: Path) -> None:
    examples = tmp_path / "osworld" / "evaluation_examples" / "examples" / "os"
    examples.mkdir(parents=True)
    task = {"id": "t1", "instruction": "Look.", "config": [], "evaluator": {"func": "infeasible"}}
    (examples / "t1.json").write_text(json.dumps(task))
    (examples / "t2.json").write_text("{")
    rebuild_catalog(StateDir(tmp_path / "var"))
    rows, missing, compacted, collected, questions, question, split, exported, found = answers(
        tmp_path,
        ["query", "SELECT count(*) AS n FROM evals"],
        ["missing-images"],
        ["compact"],
        ["collect-garbage", "--dry-run"],
        ["cookbook"],
        ["cookbook", "success-by-checkpoint", "--sql"],
        ["tasks", "--osworld-path", "osworld", "--output-dir", "split"],
        ["export", "slime", "out"],
        ["doctor", "--role", "mlflow"],
    )
    assert (rows, missing, compacted["num_written"]) == ([{"n": 0}], [], 0)
    assert (collected["is_dry_run"], collected["num_images"]) == (True, 0)
    assert question in questions
    assert split["num_train"] + split["num_test"] == 1
    assert [reject["path"].endswith("t2.json") for reject in split["rejects"]] == [True]
    assert exported["num_demonstrations"] == 0
    assert (found["role"], found["ok"]) == ("mlflow", True)
    assert [finding["name"] for finding in found["findings"]] == list(ROLES["mlflow"].checks)


@pytest.mark.parametrize(
    "command",
    [
        ["osworld_pipeline.cli", "view", "--state", "state", "--port", "0"],
        ["osworld_pipeline.cli", "receive-weights", "weights", "--port", "0"],
        ["env_server.gateway_server.main", "--port", "0", "--log-level", "error"],
    ],
)
def test_a_server_first_prints_one_line_that_names_its_address_and_process(tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "state").mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", *command, "--json"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        answer = json.loads(process.stdout.readline())
        assert answer["pid"] == process.pid
        assert httpx.get(answer["url"], timeout=10, trust_env=False).status_code in (200, 401, 404)
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=20) == (b"", b"")
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("words", "url"),
    [
        (["dev", "--port", "3001"], "http://127.0.0.1:3001"),
        (["sglang-cpu", "checkpoint", "--env", "env", "--port", "3002"], "http://127.0.0.1:3002"),
        (["sglang-cpu", "checkpoint", "--env", "env", "--", "--host", "0.0.0.0", "--port=3"], "http://127.0.0.1:3"),
    ],
)
def test_a_program_that_replaces_the_command_prints_to_stderr(tmp_path: Path, words: list[str], url: str) -> None:
    assert run(tmp_path, "init").returncode == 0
    (tmp_path / "env" / "bin").mkdir(parents=True)
    (tmp_path / "env" / "bin" / "python").touch()
    code = (
        "import os, sys; sys.argv[0] = 'osworld-pipeline'\n"
        "os.execve = lambda *_: os.execv('/bin/sh', ['sh', '-c', 'echo $$ serves'])\n"
        "from osworld_pipeline.cli import main; main()"
    )
    done = python(tmp_path, code, words[0], "--json", *words[1:])
    answer = json.loads(done.stdout)
    assert answer == {"url": url, "pid": int(done.stderr.split()[0])}
    assert done.stderr.endswith(" serves\n")


def test_an_error_is_an_object_with_its_type_and_exit_status(tmp_path: Path) -> None:
    reported = error(run(tmp_path, "query", "SELECT 1", "--json"))
    assert reported["type"] == "StoreError"
    assert "osworld-pipeline demo --state" in reported["message"]
    assert reported["exit_status"] == 1


def test_an_error_for_a_wrong_option_is_an_object_too(tmp_path: Path) -> None:
    reported = error(run(tmp_path, "doctor", "--role", "cook", "--json"))
    assert reported["exit_status"] == 2
    assert "no role named 'cook'" in reported["message"]
    assert error(run(tmp_path, "query", "--json"))["exit_status"] == 2


def test_without_json_an_error_is_printed_as_text(tmp_path: Path) -> None:
    done = run(tmp_path, "query", "SELECT 1")
    assert done.stderr.startswith("StoreError: there is no state folder")


def test_the_exit_status_of_doctor_is_that_of_the_role_and_doctor_creates_no_files(tmp_path: Path) -> None:
    done = run(tmp_path, "doctor", "--role", "sglang")
    assert done.returncode == 1
    assert "setup sglang --folder" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_doctor_loads_neither_torch_nor_dagster_and_names_every_role(tmp_path: Path) -> None:
    code = (
        "import sys, json; sys.argv = ['x', 'doctor', '--help']\n"
        "import osworld_pipeline.cli as cli, osworld_pipeline.doctor.diagnosis\n"
        "try: cli.main()\n"
        "finally: print(json.dumps(sorted(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=tmp_path, check=True
    )
    text, _, modules = done.stdout.rstrip().rpartition("\n")
    assert {"torch", "transformers", "dagster", "mlflow", "duckdb", "env_server"}.isdisjoint(json.loads(modules))
    assert [role for role in ROLES if role not in text] == []


def test_every_program_prints_its_version(tmp_path: Path) -> None:
    programs = {
        "osworld-pipeline": "osworld_pipeline.cli",
        "env-server": "env_server.main",
        "osworld-gateway": "env_server.gateway_server.main",
    }
    for program, module in programs.items():
        done = subprocess.run(
            [sys.executable, "-m", module, "--version"], cwd=tmp_path, capture_output=True, text=True, timeout=120
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == f"{program} {importlib.metadata.version('osworld-pipeline')}\n"


def test_a_defect_prints_one_sentence_and_writes_its_traceback_to_a_file(tmp_path: Path) -> None:
    done = defect(tmp_path)
    kind, _, rest = done.stderr.partition(": ")
    assert (done.returncode, kind) == (1, "InternalError")
    assert rest.count("\n") == 1
    assert "KeyError: 'shelf'" in rest
    assert "in recipe_names" in Path(rest.strip().rpartition(" ")[2]).read_text()


def test_debug_prints_the_traceback_of_a_defect_and_of_an_error(tmp_path: Path) -> None:
    done = defect(tmp_path, "--debug")
    assert "Traceback" in done.stderr
    assert done.stderr.rstrip().endswith("its traceback is above")
    assert list(tmp_path.glob("*.traceback")) == []
    refused = run(tmp_path, "query", "SELECT 1", "--debug")
    assert "Traceback" in refused.stderr
    assert "StoreError: there is no state folder" in refused.stderr.splitlines()[-1]


def test_an_error_for_a_missing_package_is_an_object_that_names_its_extra(tmp_path: Path) -> None:
    reported = error(without(tmp_path, "duckdb", "query", "SELECT 1", "--json"))
    assert reported["type"] == "DependencyError"
    assert "duckdb is not installed here; run" in reported["message"]


def test_a_server_without_its_extra_names_it(tmp_path: Path) -> None:
    code = "import sys; sys.modules['fastapi'] = None; from osworld_pipeline.console_scripts import {}; sys.exit({}())"
    for script, program in {"env_server": "env-server", "gateway": "osworld-gateway"}.items():
        done = python(tmp_path, code.format(script, script))
        assert done.returncode == 1
        assert done.stderr.startswith(f"{program}: fastapi is not installed here; run")
        assert "Traceback" not in done.stderr


def defect(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Runs a command whose function raises an unexpected exception."""
    code = (
        "import sys; sys.argv = ['osworld-pipeline', 'recipes', *sys.argv[1:]]\n"
        "import osworld_pipeline.cli, osworld_pipeline.recipes\n"
        "def recipe_names(): raise KeyError('shelf')\n"
        "osworld_pipeline.recipes.recipe_names = recipe_names\n"
        "osworld_pipeline.cli.main()"
    )
    return python(folder, code, *options)


def without(folder: Path, package: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a command in a Python that lacks a package."""
    (folder / "var").mkdir()
    code = (
        "import sys; sys.argv = ['osworld-pipeline', *sys.argv[1:]]\n"
        f"sys.modules[{package!r}] = None\n"
        "from osworld_pipeline.cli import main; main()"
    )
    return python(folder, code, *arguments)


def python(folder: Path, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=folder,
        env={**os.environ, "TMPDIR": str(folder), "COLUMNS": "400"},
        capture_output=True,
        text=True,
        timeout=60,
    )
