"""A sample store, written once."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from viewer_samples import write_sample_store

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.web.viewer.index import EpisodeIndex


@pytest.fixture(scope="session")
def sample_state(tmp_path_factory: pytest.TempPathFactory) -> StateDir:
    """A state that tests must not write to: see `own_state`."""
    state = StateDir(tmp_path_factory.mktemp("viewer"))
    write_sample_store(state)
    return state


@pytest.fixture(scope="session")
def sample_index(sample_state: StateDir) -> Iterator[EpisodeIndex]:
    index = EpisodeIndex(sample_state)
    index.refresh()
    yield index
    index.close()


@pytest.fixture
def own_state(sample_state: StateDir, tmp_path: Path) -> StateDir:
    """A sample state that a test may change."""
    return StateDir(shutil.copytree(sample_state.root, tmp_path / "var"))
