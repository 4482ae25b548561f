"""What Prometheus sees of a viewer that a user started."""

import os
import subprocess
import sys
from pathlib import Path

import httpx
from scraped import scrape, wait_for_target

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.wire.metrics_endpoint import VARIABLE

PATIENCE_S = 60.0


def test_the_viewer_is_among_the_processes_of_its_state(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    program = [sys.executable, "-m", "osworld_pipeline.cli", "view", "--state", str(tmp_path), "--port", "0"]
    viewer = subprocess.Popen(program, env={**os.environ, VARIABLE: "0"}, stdout=subprocess.PIPE, text=True)
    try:
        target = wait_for_target(state.metrics_targets, "viewer", limit_s=PATIENCE_S)
        assert viewer.stdout is not None
        (url,) = [word for word in viewer.stdout.readline().split() if word.startswith("http://")]
        assert httpx.get(f"{url}static/viewer.css", trust_env=False, timeout=PATIENCE_S).status_code == 200
        found = scrape(target)
        viewer.terminate()
        viewer.wait(PATIENCE_S)
        assert list(state.metrics_targets.iterdir()) == []
    finally:
        viewer.kill()
        viewer.communicate()
    (counted,) = [name for name in found if name.startswith("osworld_http_requests_total")]
    assert counted.endswith(" 200")
    assert found["process_resident_memory_bytes"] > 0
