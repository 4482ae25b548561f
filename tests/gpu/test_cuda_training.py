"""Training on a GPU gives the weights and losses of a CPU, with a whole model and with a model sharded over NCCL.
Weights are broadcast over NCCL."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import train_on_ranks
from torchrun_process import torchrun
from training_samples import saved_metrics, saved_weights

from osworld_pipeline.agent.logits import project_logits
from osworld_pipeline.rollout.engines.update_group import Packer, UpdateGroup, backend_for
from osworld_pipeline.training.distributed.process_group import ProcessGroup

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(300)]

VARIANTS = ("plain", "packed", "lora")
CHECKPOINTS = ("sft.partial/update-0002", "sft-resumed.partial/update-0003", "gspo.partial/update-0001")
MAX_SHARE = 1e-3
"""AdamW moves a weight whose gradient is almost 0 by up to the learning rate in either direction; so few may."""
LIMIT_S = 200.0


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    # The ranks look for this folder next to their own folder, and continue from it.
    folder = tmp_path_factory.mktemp("ranks") / "alone"
    for variant in VARIANTS:
        train_on_ranks.train(ProcessGroup.alone("cpu"), tiny_folder, folder / variant, variant)
    return folder


def assert_same(ours: Path, theirs: Path) -> None:
    one, other = saved_weights(ours), saved_weights(theirs)
    assert one.keys() == other.keys()
    diffs = torch.cat([(one[name] - other[name]).abs().flatten() for name in one])
    print(f"{ours.name}: mean {diffs.mean():.2g}, largest {diffs.max():.2g}, share above 1e-5 {shares(diffs):.2g}")
    assert shares(diffs) < MAX_SHARE
    assert saved_metrics(ours) == pytest.approx(saved_metrics(theirs), abs=1e-4, rel=1e-3)


def shares(diffs: torch.Tensor) -> float:
    return float((diffs > 1e-5).float().mean())


@pytest.mark.parametrize("variant", VARIANTS)
def test_training_on_one_gpu_gives_the_weights_and_losses_of_a_cpu(
    tmp_path: Path, tiny_folder: Path, on_cpu: Path, variant: str
) -> None:
    train_on_ranks.train(ProcessGroup.alone("cuda"), tiny_folder, tmp_path, variant)
    for name in CHECKPOINTS:
        assert_same(tmp_path / "checkpoints" / name, on_cpu / variant / "checkpoints" / name)


def test_sharded_nccl_training_with_and_without_offload_equals_cpu_training(tiny_folder: Path, on_cpu: Path) -> None:
    folder = on_cpu.with_name("together")
    folder.mkdir()
    program = Path(__file__).with_name("on_gpus.py")
    variants = (*VARIANTS, "offload")
    log = folder / "log"
    with log.open("w") as output:
        process = torchrun(
            str(program), tiny_folder, folder, *variants, output=output, num_ranks=torch.cuda.device_count()
        )
    try:
        assert process.wait(LIMIT_S) == 0, log.read_text()
    except subprocess.TimeoutExpired:
        pytest.fail(f"not within {LIMIT_S:.0f} s: {log.read_text()}")
    finally:
        process.kill()
    for variant in variants:
        alone = on_cpu / ("plain" if variant == "offload" else variant) / "checkpoints"
        for name in CHECKPOINTS:
            assert_same(folder / variant / "checkpoints" / name, alone / name)
        if variant != "offload":
            resumed = folder / variant / "of-one-rank" / "checkpoints" / CHECKPOINTS[1]
            assert_same(resumed, alone / CHECKPOINTS[1])


def test_logits_of_bfloat16_weights_are_computed_in_float32() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(2560, 4096, bias=False, dtype=torch.bfloat16, device="cuda")
    hidden_ND = torch.randn(64, 2560, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    logits_NV = project_logits(layer, hidden_ND)
    exact_NV = hidden_ND.detach().double() @ layer.weight.detach().double().T
    assert logits_NV.dtype == torch.float32
    assert float((logits_NV.detach() - exact_NV).abs().max()) < 1e-4
    logits_NV.sum().backward()
    assert hidden_ND.grad is not None
    assert layer.weight.grad is not None


def test_weights_are_broadcast_over_nccl() -> None:
    """Broadcasts to no other rank, because NCCL allows one rank per GPU."""
    group = UpdateGroup(address="127.0.0.1", world_size=1, timeout_s=30.0)
    buckets: list[torch.Tensor] = []
    packer = Packer(lambda bucket, _: buckets.append(bucket.data), max_bytes=64 << 20)
    weights = [torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(16)]
    for number, tensor in enumerate(weights):
        packer.add(f"w{number}", tensor)
    packer.finish()
    assert backend_for(buckets[0].device) == "nccl"
    try:
        group.connect(buckets[0].device)
        group.broadcast(buckets[0], is_stopped=lambda: False)
        started = time.monotonic()
        for bucket in buckets:
            group.broadcast(bucket, is_stopped=lambda: False)
        seconds = time.monotonic() - started
    finally:
        group.close()
    num_bytes = sum(bucket.nbytes for bucket in buckets)
    print(f"{len(buckets)} buckets, {num_bytes / 1e9 / seconds:.1f} GB/s", file=sys.stderr)
    sent = torch.cat(buckets).view(torch.bfloat16)
    assert torch.equal(sent, torch.cat([tensor.flatten() for tensor in weights]))
