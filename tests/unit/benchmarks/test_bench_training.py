"""The training benchmark on a CPU: every trainer gets the same tokens, and the part for a GPU runs at a tiny size."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from benchmarks.processes import BenchmarkError
from benchmarks.training_gpu import Architecture, Bench, run_gpu
from benchmarks.training_trainers import SETTINGS, Recorded, Work, make_work
from osworld_pipeline.domain.trajectory import Trajectory

TINY = Architecture(
    vocab_size=512, hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=32,
    mrope_section=(8, 4, 4), max_positions=1000, vision_depth=1, vision_hidden_size=16, vision_intermediate_size=32,
    vision_heads=2, deepstack_layers=(0,),
)  # fmt: skip


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


def test_model_flop_of_an_update_by_hand():
    # Weights of the layer: q and o 2 * 32 * 64, k and v 2 * 32 * 32, MLP 3 * 32 * 64: 12,288. Ten tokens: 245,760.
    # Attention 2 * 64 * 10^2 = 12,800; two responses' logits 2 * 32 * 512 * 2 = 65,536. Four forward passes' worth.
    # The tower: (4 * 16^2 + 2 * 16 * 32) * 2 * 8 patches = 32,768, forward twice.
    trajectory = Trajectory(
        trajectory_id="a", task_id="t", token_ids=(1,) * 10, response_mask=(0,) * 8 + (1, 1), images=()
    )
    expected = 4 * (245_760 + 12_800 + 65_536) + 2 * 32_768
    assert TINY.update_flops([trajectory], num_patches=8) == expected


def test_the_gpu_part_times_updates_and_finds_the_largest_context(tmp_path: Path):
    bench = Bench(tmp_path, TINY, device="cpu", dtype=torch.float32)
    times, flops, num_tokens = bench.time_updates(1, context=300, screen=(96, 64))
    assert len(times) == 1
    assert num_tokens == 4 * 300
    assert flops > 0
    assert bench.largest_context(screen=(96, 64), limit=TINY.max_positions, step=100) == TINY.max_positions


def test_a_context_that_does_not_fit_is_found_to_within_a_step(tmp_path: Path):
    bench = Bench(tmp_path, TINY, device="cpu", dtype=torch.float32)

    def update(trajectories) -> None:
        if len(trajectories[0].token_ids) > 700:
            raise torch.OutOfMemoryError

    bench._trainer = SimpleNamespace(update=update)
    assert 690 <= bench.largest_context(screen=(96, 64), limit=TINY.max_positions, step=10) <= 700


def test_a_context_of_no_turn_is_refused(tmp_path: Path):
    with pytest.raises(BenchmarkError, match="too short"):
        Bench(tmp_path, TINY, device="cpu", dtype=torch.float32).time_updates(1, context=16, screen=(96, 64))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]):
    assert run_gpu(Console(width=200), num_updates=1, peak_tflops=None) == []
    assert "no CUDA device" in capsys.readouterr().out
