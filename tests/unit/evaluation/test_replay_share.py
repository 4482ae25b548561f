"""What replay contributed: groups that a recorded success joined, and tasks that were solved only afterwards."""

from pathlib import Path

import pytest
from viewer_samples import GSPO, SFT, write_sample_store

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.evaluation.replay_share import ReplayShare, read_replay_share


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> StateDir:
    """Two groups of one task: the first has no success and a replay row joins it; the second has a success."""
    state = StateDir(tmp_path_factory.mktemp("state"))
    write_sample_store(state)
    return state


def test_a_task_first_solved_after_a_demonstration_joined_its_group_is_counted(state: StateDir) -> None:
    share = ReplayShare(num_groups=2, num_injected=1, num_tasks=1, num_solved_later=1)
    assert read_replay_share(state, [SFT, GSPO]) == share


def test_another_training_in_the_same_state_is_left_out(state: StateDir) -> None:
    assert read_replay_share(state, [SFT]) == ReplayShare(num_groups=0, num_injected=0, num_tasks=0, num_solved_later=0)


def test_an_empty_state_has_no_groups(tmp_path: Path) -> None:
    assert read_replay_share(StateDir(tmp_path), [GSPO]).num_groups == 0
