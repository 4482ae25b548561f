"""An update of a GSPO phase is in the trace of each episode that it trained on."""

from pathlib import Path
from typing import Any

from phase_samples import job_of, recipe_of, run_phase
from trace_collector import collecting_traces, tracing_to

from osworld_pipeline.wire.tracing import ids_of


def test_an_update_joins_the_traces_of_the_episodes_that_it_trained_on(tmp_path: Path, processor: Any) -> None:
    with collecting_traces() as collector, tracing_to(collector.url):
        ran = run_phase(job_of(tmp_path, recipe_of()), processor)
    trained = {
        (one.episode_id, update)
        for update, trajectories in ran.trainer.seen
        for one in trajectories
        if not (one.is_replay or one.is_canary)
    }
    assert len(trained) > 4
    updates = {one.trace_id: one.attributes["osworld.update"] for one in collector.spans if one.name == "train"}
    assert len(updates) == len(trained)
    for episode_id, update in trained:
        assert updates[ids_of(episode_id)[0]] == update
