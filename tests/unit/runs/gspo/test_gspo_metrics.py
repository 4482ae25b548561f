"""The metrics that Prometheus reads from a running GSPO phase."""

from pathlib import Path
from typing import Any

import pytest
from phase_samples import STAGE, job_of, recipe_of, run_phase
from scraped import scrape, targets_in

from osworld_pipeline.domain.episode import Outcome
from osworld_pipeline.wire.metrics_endpoint import VARIABLE

NUM_EPISODES = 32
"""Four updates of two groups of four."""


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
def test_episodes_updates_and_utilisation_are_served_during_the_phase(
    tmp_path: Path, processor: Any, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setenv(VARIABLE, "0")
    job = job_of(tmp_path, recipe_of(mode=mode))
    scrapes: list[dict[str, float]] = []

    def look(number: int) -> Outcome | None:
        if number in (3, NUM_EPISODES - 1):
            scrapes.append(scrape(targets_in(job.state.metrics_targets)["train_gspo"]))
        return Outcome.ENV_FAULT if number == 1 else None

    ran = run_phase(job, processor, faults=look)
    first, last = scrapes
    assert first[f"osworld_program {STAGE} train_gspo"] == 1
    assert 0 < first["osworld_busy environments"] <= 6
    assert first["osworld_capacity environments"] == 2
    assert first["osworld_updates"] == 0
    assert last["osworld_episodes_ended_total env_fault train"] == 1
    ended = sum(value for name, value in last.items() if name.startswith("osworld_episodes_ended_total"))
    assert NUM_EPISODES - 6 <= ended < NUM_EPISODES
    assert last["osworld_steps_total"] == 2 * ended
    assert last["osworld_updates"] >= 1
    assert last["osworld_handover_seconds_count"] == last["osworld_updates"] - 1, "not of the weights in the making"
    assert (last["osworld_handover_bytes_total"] > 0) == (last["osworld_updates"] > 1)
    assert last["osworld_update_metric loss"] == 0.0
    assert last["osworld_busy_seconds_total trainer"] > 0
    assert last["osworld_progress_planned train_gspo"] == NUM_EPISODES
    assert (last["osworld_groups running"] > 0) == (mode == "asynchronous")
    assert ["handover_s" in ran.metrics[update] for update in (1, 2, 3, 4)] == [False, True, True, True]
    assert list(job.state.metrics_targets.iterdir()) == []
