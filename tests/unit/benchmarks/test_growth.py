"""The benchmark of a state that grows: the pipeline reads its state, and the benchmark's guess continues the growth."""

from pathlib import Path

import pytest

from benchmarks.grown_state import STEPS
from benchmarks.growth import TARGET, Growth, _guess, grow
from benchmarks.spread import Spread
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.store import TrajectoryStore
from osworld_pipeline.store.part_files import take_snapshot
from osworld_pipeline.tables.query import run_query

COUNTS = """
SELECT count(*), count(DISTINCT episode_id), (SELECT count(*) FROM steps),
       (SELECT sum(num_valid) FROM rollout_groups)
FROM episodes
"""


def test_a_grown_state_has_every_episode_once_and_the_pipeline_reads_them(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    (run,) = grow(state, 0, 40)[:1]
    assert run_query(state, COUNTS).rows == [(40, 40, 40 * STEPS, 20)]
    grow(state, 40, 50)
    assert run_query(state, COUNTS).rows == [(50, 50, 50 * STEPS, 25)]
    episode = TrajectoryStore(state).find_episode(run.episode_id(3))
    assert len(episode.steps) == STEPS
    files = take_snapshot(state.trajectories, "episodes")
    assert (len(files.compacted), len(files.small)) == (1, 5)


@pytest.mark.parametrize(("times", "guessed"), [((10, 20, 20), "20"), ((10, 20, 40), "400"), ((10, 20, 5), "5")])
def test_the_guess_extends_the_growth_from_the_second_to_the_third_size(times: tuple[float, ...], guessed: str) -> None:
    sizes = [TARGET // 40, TARGET // 20, TARGET // 10]
    found = [Spread.of([one]) for one in times]
    assert _guess(Growth(sizes=sizes), found) == guessed
