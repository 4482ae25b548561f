"""What Prometheus scrapes from a real program that runs."""

import json
from pathlib import Path

import pytest
from scraped import scrape, targets_in
from sft_process import NUM_UPDATES, finish, prepare, start

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.wire.metrics_endpoint import VARIABLE


@pytest.mark.slow
def test_a_running_training_is_scraped_at_the_address_in_its_state(tmp_path: Path) -> None:
    job = prepare(tmp_path)
    folder = StateDir(tmp_path).metrics_targets
    training = start(job, {VARIABLE: "0"})
    assert training.stdout is not None
    found: dict[str, float] = {}
    for line in training.stdout:
        message = json.loads(line)
        if message["kind"] == "metrics" and message["update"] < NUM_UPDATES and not found:
            found = scrape(targets_in(folder)["train_sft"])
    finish(training)
    assert found["osworld_program sft-1 train_sft"] == 1
    assert 0 < found["osworld_updates"] <= NUM_UPDATES
    assert found["osworld_progress_planned train_sft"] == NUM_UPDATES
    assert found["osworld_update_seconds"] > 0
    assert found["osworld_update_metric loss"] > 0
    assert found["process_cpu_seconds_total"] > 0
    assert list(folder.iterdir()) == []
