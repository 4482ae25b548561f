"""The env server is installed alone: the wheel with `[server]` in an environment of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
UV = Path(sys.executable).parent / "uv"
HEAVY = ("torch", "transformers", "dagster", "mlflow", "pyarrow", "duckdb", "numpy")

pytestmark = [pytest.mark.slow]


def run(*argv: str | Path, cwd: Path, timeout_s: float = 240.0) -> str:
    done = subprocess.run(
        [str(part) for part in argv], cwd=cwd, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The environment's bin folder."""
    folder = tmp_path_factory.mktemp("alone")
    run(UV, "build", "--wheel", "--quiet", "--out-dir", folder, cwd=ROOT)
    (wheel,) = folder.glob("*.whl")
    run(UV, "venv", "--quiet", "--python", sys.executable, folder / "venv", cwd=folder)
    python = folder / "venv/bin/python"
    run(UV, "pip", "install", "--quiet", "--python", python, "--constraint", ROOT / "constraints.txt",
        f"{wheel}[server]", cwd=folder)  # fmt: skip
    return python.parent


def test_the_bare_installation_sets_up_the_host_and_names_what_else_is_needed(alone: Path, tmp_path: Path) -> None:
    assert "osworld-pipeline init" in run(alone / "osworld-pipeline", cwd=tmp_path)
    run(alone / "osworld-pipeline", "setup", "--dry-run", cwd=tmp_path)
    done = subprocess.run(
        [alone / "osworld-pipeline", "demo"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)
    assert "is not installed here; run `" in done.stderr


def test_the_server_runs_without_the_rest_of_the_pipeline(alone: Path) -> None:
    code = (
        "import sys, json, env_server.main as m\n"
        "try: m.main(['--help'])\n"
        "except SystemExit as end: assert not end.code\n"
        "print(json.dumps(sorted(sys.modules)))"
    )
    loaded = json.loads(run(alone / "python", "-c", code, cwd=alone).splitlines()[-1])
    assert not set(HEAVY) & set(loaded)
    found = run(alone / "python", "-c", "import importlib.util as u; print([m for m in "
                f"{HEAVY!r} if u.find_spec(m)])", cwd=alone)  # fmt: skip
    assert found.strip() == "[]", "a desktop host downloads no trainer"


@pytest.mark.desktop
def test_a_desktop_served_by_the_bare_installation_answers(alone: Path, tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    command = [alone / "env-server", "--replicas", "1", "--port", "0", "--screen-size", "512x320",
               "--state-dir", tmp_path / "desktops", "--ready-file", ready,
               "--die-with-parent", str(os.getpid())]  # fmt: skip
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, cwd=tmp_path)
    try:
        code = (
            "import json, sys, time, pathlib, httpx\n"
            "ready = pathlib.Path(sys.argv[1]); limit = time.monotonic() + 120\n"
            "while not ready.exists() and time.monotonic() < limit: time.sleep(0.05)\n"
            "url = json.loads(ready.read_text())['url']\n"
            "task = {'id': 't', 'instruction': 'Look.', 'evaluator': {'func': 'infeasible'}}\n"
            "http = httpx.Client(base_url=url, timeout=60, trust_env=False)\n"
            "first = http.post('/reset', json={'task_config': task}).raise_for_status().json()\n"
            "episode = {'episode_id': first['episode_id']}\n"
            "http.post('/step', json={**episode, 'action': 'FAIL', 'pause': 0}).raise_for_status()\n"
            "print(http.post('/evaluate', json=episode).raise_for_status().json()['reward'])\n"
        )
        assert run(alone / "python", "-c", code, ready, cwd=tmp_path).strip() == "1.0"
    finally:
        server.terminate()
        assert server.wait(30) == 0, (tmp_path / "log").read_text()[-2000:]
