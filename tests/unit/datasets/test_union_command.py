"""The command `union`: what it writes, what it says, and how it fails."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from raw_samples import config, put_lines, put_task, record

from osworld_pipeline.domain.state import StateDir


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    state = StateDir(tmp_path)
    put_task(state, config("tree_only"))
    put_lines(state, "bc_sft", [record("t1"), record("t1"), "{"])
    return state


def run(state: StateDir, *options: str) -> subprocess.CompletedProcess[str]:
    places = ["--hf-root", state.datasets, "--osworld-repo", state.osworld_repo, "--output-dir", state.root / "out"]
    command = [sys.executable, "-m", "osworld_pipeline.cli", "union", *map(str, places), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_the_command_writes_five_files_and_prints_statistics_duplicates_and_rejects(state: StateDir) -> None:
    (state.root / "prompt.txt").write_bytes("Act — so.\r\n".encode())
    result = run(state, "--with-tree-tasks", "--system-prompt", str(state.root / "prompt.txt"))
    assert result.returncode == 0, result.stderr
    assert sorted(path.name for path in (state.root / "out").iterdir()) == [
        "osworld_rejects.parquet", "osworld_replay_train.jsonl", "osworld_tasks_all.parquet",
        "osworld_tasks_train.parquet", "osworld_train_stats.json",
    ]  # fmt: skip
    stats = json.loads((state.root / "out" / "osworld_train_stats.json").read_text())
    assert stats["union_task_ids"] == 2
    assert json.dumps(stats, indent=2) in result.stdout
    assert "duplicates left out: 1\n" in result.stdout
    assert "rejects: malformed 1 (file, line and reason in osworld_rejects.parquet)" in result.stdout
    assert "missing, skipped: sft_curated_final" in result.stderr
    (line,) = (state.root / "out" / "osworld_replay_train.jsonl").read_text().splitlines()
    assert json.loads(line)["messages"][0] == {"role": "system", "content": "Act — so.\r\n"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--system-prompt", "no-such-file"], "cannot read the system prompt no-such-file: No such file"),
        (["--dialect", "klingon"], "no dialect named 'klingon'"),
    ],
)
def test_a_wrong_option_gives_one_clear_error(state: StateDir, options: list[str], message: str) -> None:
    result = run(state, *options)
    assert result.returncode == 1
    assert message in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr
    assert not (state.root / "out").exists()
