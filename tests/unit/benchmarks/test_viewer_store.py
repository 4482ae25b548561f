"""The viewer can read the store that it is measured on."""

from pathlib import Path

from benchmarks.viewer_store import STEPS_AN_EPISODE, write_store
from osworld_pipeline.web.viewer.episode import Episodes
from osworld_pipeline.web.viewer.index import EpisodeIndex


def test_synthetic_store_is_read_whole_compacted_and_fresh(tmp_path: Path) -> None:
    state = write_store(tmp_path, num_episodes=40, num_images=1)
    index = EpisodeIndex(state)
    index.refresh()
    with index.reading() as reader:
        kinds = reader.rows(
            "SELECT is_compacted, count(*), count(instruction), count(stage) FROM facts GROUP BY 1 ORDER BY 1"
        )
        (name,) = reader.rows("SELECT episode_id FROM facts WHERE is_compacted LIMIT 1")[0]
    assert kinds == [(False, 20, 20, 20), (True, 20, 20, 20)]
    view = Episodes(state, index).view(name)
    assert len(view.steps) == STEPS_AN_EPISODE
    assert all(step.is_image_there and step.drawn.marks for step in view.steps)
    index.close()
