"""The training benchmark: every trainer gets the same tokens."""

import pytest

from benchmarks.training_trainers import SETTINGS, Recorded, Work, make_work, time_ours


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Work:
    return make_work(tmp_path_factory.mktemp("work") / "model")


def test_trls_sampler_hands_out_each_recorded_token_once_with_its_mask(work: Work):
    tasks = [trajectory.task_id for trajectory in work.trajectories]
    found = Recorded(work)(tasks, None)
    for index, trajectory in enumerate(work.trajectories):
        prompt, completion = found["prompt_ids"][index], found["completion_ids"][index]
        assert tuple(prompt + completion) == trajectory.token_ids
        assert tuple([0] * len(prompt) + found["env_mask"][index]) == trajectory.response_mask
        assert found["env_mask"][index][0] == 1
        assert len(found["logprobs"][index]) == len(completion)
        assert found["earned"][index] == trajectory.advantage


def test_siblings_share_their_prompt_and_every_group_has_a_signal(work: Work):
    for start in range(0, len(work.trajectories), SETTINGS.group_size):
        group = work.trajectories[start : start + SETTINGS.group_size]
        prompts = {trajectory.token_ids[: trajectory.response_mask.index(1)] for trajectory in group}
        assert len(prompts) == 1
        assert sum(trajectory.advantage for trajectory in group) == 0


def test_our_trainer_makes_the_requested_number_of_updates(work: Work):
    assert len(time_ours(work, 1)) == 1
