"""Names that a real shell completes for `osworld-pipeline`."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="bash completes here")
WORDS = {
    "train --recipe qwen3vl_4b_no": {"qwen3vl_4b_node"},
    "train --recipe own": {"own.toml"},
    "evaluate --state {state} --suite fir": {"first"},
    "evaluate --state {state} --checkpoint 11": {"1122", "1133"},
    "backfill --state {state} --checkpoints 1122,11": {"1122,1122", "1122,1133"},
    "cookbook success-by-ch": {"success-by-checkpoint"},
    "coo": {"cookbook"},
}


@pytest.mark.parametrize("line", WORDS)
def test_a_shell_completes_names_of_commands_recipes_suites_and_checkpoints(tmp_path: Path, line: str) -> None:
    state = tmp_path / "runs"
    for name in ("1122", "1133"):
        (state / "checkpoints" / name).mkdir(parents=True)
    (state / "suites").mkdir()
    (state / "suites" / "first.json").write_text("[]")
    (tmp_path / "own.toml").write_text("")
    words = ["osworld-pipeline", *shlex.split(line.format(state=state))]
    environment = {
        **os.environ,
        "_OSWORLD_PIPELINE_COMPLETE": "complete_bash",
        "COMP_WORDS": shlex.join(words),
        "COMP_CWORD": str(len(words) - 1),
    }
    code = "import sys; sys.argv[0] = 'osworld-pipeline'; from osworld_pipeline.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert set(done.stdout.split()) == WORDS[line], done.stderr
