"""The published Qwen3-VL-4B shape takes whole SFT and GSPO updates on a CPU: real tokenizer, real widths, screens of a
desktop's size, random weights, and few layers."""

import asyncio
import gc
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from real_processor import real_processor

from benchmarks.real_shape import Architecture, build_model, has_fast_bfloat16
from benchmarks.real_turns import demonstration, sampled_episode, screen
from osworld_pipeline.agent.images import prepare_screenshot
from osworld_pipeline.agent.model_inputs import PixelCache
from osworld_pipeline.agent.renderer import Renderer, image_size
from osworld_pipeline.domain.trajectory import Trajectory
from osworld_pipeline.recipes.schema import GspoSharedSection, LoraSection, SftSection, TrainerSection
from osworld_pipeline.rollout.engines.transformers import TransformersEngine
from osworld_pipeline.runs.parity.exactness import compare_trajectories
from osworld_pipeline.training.objective.loss import MAX_CHUNK_LOGITS, token_logprobs
from osworld_pipeline.training.objective.score import score_trajectories
from osworld_pipeline.training.sft import SftTrainer
from osworld_pipeline.training.update import GspoTrainer
from osworld_pipeline.training.weights import lora

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

ONE_LAYER = Architecture(num_layers=1, vision_depth=2, deepstack_layers=(0,))
TWO_LAYERS = Architecture(num_layers=2, vision_depth=2, deepstack_layers=(0, 1))
THIN = Architecture(
    hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4, num_kv_heads=2, vision_depth=3,
    vision_hidden_size=64, vision_intermediate_size=128, vision_heads=4, deepstack_layers=(0, 1),
)  # fmt: skip
CPU = torch.device("cpu")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SCREEN = (384, 192)
"""Of the wide models; the test of real screens has their whole size."""
MAX_DIFF = {"float32": 1e-4, "bfloat16": 0.02}
"""Of the mean |trainer - sampler| of a token."""
WIDE_SHARPNESS = 2.0
"""Logits of real widths are larger, and so is what bfloat16 makes of them."""
LORA = LoraSection(rank=16, alpha=32)
NEEDED_GB = 13.0
"""Free memory below which a full update of this vocabulary is not begun."""
LIMIT_GB = 12.0
SFT = SftSection(num_updates=4, learning_rate=1e-4, warmup_updates=0)
GSPO = GspoSharedSection(kl_coef=0.0, learning_rate=1e-4, minibatches_per_update=1, micro_batch_size=1)


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return real_processor(tmp_path_factory.mktemp("real") / "processor")


@pytest.fixture(scope="module")
def renderer(processor: Any) -> Renderer:
    return Renderer(processor)


@pytest.fixture(autouse=True)
def memory_of_its_own() -> Iterator[None]:
    gc.collect()
    # The kernel starts counting the peak again.
    Path("/proc/self/clear_refs").write_text("5")
    yield
    gc.collect()


def peak_gb() -> float:
    return _gb("/proc/self/status", "VmHWM")


def _gb(file: str, key: str) -> float:
    line = next(line for line in Path(file).read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024 / 1e9


def need_memory() -> None:
    free = _gb("/proc/meminfo", "MemAvailable")
    if free < NEEDED_GB:
        pytest.skip(f"{free:.0f} GB of memory are free, {NEEDED_GB:.0f} GB are needed")


def need_dtype(dtype: str) -> None:
    if dtype == "bfloat16" and not has_fast_bfloat16(CPU):
        pytest.skip("this CPU does not multiply bfloat16 itself: AVX-512 BF16 or AMX is needed")


def usual_dtype() -> str:
    """The dtype of real training, if this CPU is fast enough for it."""
    return "bfloat16" if has_fast_bfloat16(CPU) else "float32"


def sample(
    model: Any, processor: Any, images: list[list[bytes]], *, num_tokens: int = 8, policy_version: int = 0
) -> list[Trajectory]:
    """An episode for each list of images, the advantages +1 and -1 in turns."""

    async def run() -> list[Trajectory]:
        # A second thread helps only a wide model.
        num_threads = 1 if model.config.text_config.hidden_size < 1000 else torch.get_num_threads()
        engine = TransformersEngine(
            model, processor, timeout_s=500, num_threads=num_threads, policy_version=policy_version
        )
        try:
            episodes = [
                sampled_episode(
                    engine,
                    Renderer(processor),
                    f"e{index}",
                    screens,
                    max_new_tokens=num_tokens,
                    advantage=1.0 - 2 * (index % 2),
                    prompt="short",
                )
                for index, screens in enumerate(images)
            ]
            return list(await asyncio.gather(*episodes))
        finally:
            await engine.close()

    return asyncio.run(run())


def check_exact(trajectories: list[Trajectory], model: Any, processor: Any, dtype: str) -> None:
    report = compare_trajectories(trajectories, model, processor)
    print(f"{dtype}: {report.num_tokens} tokens, mean difference {report.mean_diff:.2g}, largest {report.max_diff:.2g}")
    assert report.num_tokens == sum(sum(one.response_mask) for one in trajectories)
    assert report.mean_diff <= MAX_DIFF[dtype]
    if dtype == "float32":
        assert report.max_diff <= MAX_DIFF[dtype]


def trained_copy(model: Any) -> dict[str, torch.Tensor]:
    """A few rows of each trained tensor: a whole copy would be gigabytes."""
    return {name: param.detach()[:64].clone() for name, param in model.named_parameters() if param.requires_grad}


def moved(model: Any, before: dict[str, torch.Tensor]) -> list[str]:
    now = trained_copy(model)
    return [name for name, tensor in before.items() if not torch.equal(tensor, now[name])]


def sft_then_gspo(model: Any, processor: Any, dtype: str, *, section: TrainerSection) -> None:
    """Runs one update of each on the same model. Checks exactness before and after, and which weights moved."""
    renderer, cache = Renderer(processor), PixelCache()
    first, second = screen(0, SCREEN), screen(1, SCREEN)
    before = trained_copy(model)
    sft = SftTrainer(model, processor, SFT, section=section, cache=cache)
    metrics = sft.update([demonstration(renderer, "d", [first], prompt="short")])
    assert math.isfinite(metrics["loss"])
    assert metrics["loss"] > 1
    assert moved(model, before)
    del sft
    gc.collect()

    before = trained_copy(model)
    trajectories = sample(model, processor, [[second]])
    width, height = image_size(second)
    assert trajectories[0].token_ids.count(processor.image_token_id) == (width // 32) * (height // 32)
    settings = GSPO.model_copy(update={"max_logprob_diff": MAX_DIFF[dtype]})
    # The update raises an error if trainer and sampler differ by more.
    metrics = GspoTrainer(model, processor, settings, section=section, cache=cache).update(trajectories)
    print(f"{dtype}: mean difference {metrics['trainer_sampler_logprob_diff']:.2g}, loss {metrics['loss']:.3g}")
    assert math.isfinite(metrics["loss"])
    assert 0 < metrics["grad_norm"] < math.inf
    assert moved(model, before)
    check_exact(sample(model, processor, [[second]]), model, processor, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_weights_of_one_layer_and_the_real_embedding_take_updates(processor: Any, dtype: str) -> None:
    need_memory()
    need_dtype(dtype)
    model = build_model(ONE_LAYER, device="cpu", dtype=DTYPES[dtype], sharpness=WIDE_SHARPNESS)
    model.model.visual.requires_grad_(False)
    model.activation_checkpointing_enable()
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert model.lm_head.weight.shape == (151_936, 2560)
    sft_then_gspo(model, processor, dtype, section=TrainerSection())
    print(f"{dtype}: {peak_gb():.1f} GB at most")
    assert peak_gb() < LIMIT_GB


def test_adapters_on_two_layers_of_the_real_width_take_updates(processor: Any) -> None:
    dtype = usual_dtype()
    model = build_model(TWO_LAYERS, device="cpu", dtype=DTYPES[dtype], sharpness=WIDE_SHARPNESS)
    lora.add_adapters(model, LORA, seed=0)
    model.activation_checkpointing_enable()
    frozen = model.lm_head.weight[:64].clone()
    sft_then_gspo(model, processor, dtype, section=TrainerSection(lora=LORA))
    assert torch.equal(model.lm_head.weight[:64], frozen)
    print(f"{dtype}: {peak_gb():.1f} GB at most")
    assert peak_gb() < LIMIT_GB


@pytest.mark.parametrize(("architecture", "num_screens"), [(ONE_LAYER, 1), (THIN, 3)], ids=["wide", "thin"])
def test_trainer_and_sampler_agree_on_real_screens(
    processor: Any, real_data: Path, architecture: Architecture, num_screens: int
) -> None:
    files = sorted((real_data / "agentnet" / "images").glob("*.png"))[:num_screens]
    screens = [prepare_screenshot(file.read_bytes(), 1_003_520).data for file in files]
    dtype = usual_dtype()
    model = build_model(architecture, device="cpu", dtype=DTYPES[dtype], sharpness=WIDE_SHARPNESS)
    (trajectory,) = sample(model, processor, [screens])
    assert trajectory.token_ids.count(processor.image_token_id) == num_screens * 880
    check_exact([trajectory], model, processor, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_turns_and_updates_stay_exact_with_the_real_vocabulary_and_a_thin_model(processor: Any, dtype: str) -> None:
    model = build_model(THIN, device="cpu", dtype=DTYPES[dtype])
    model.model.visual.requires_grad_(False)
    section = TrainerSection(max_tokens_per_batch=4096)
    trainer = GspoTrainer(model, processor, GSPO, section=section)
    for update in range(2):
        images = [[screen(10 * update + index + turn, (512, 320)) for turn in range(3)] for index in range(2)]
        trajectories = sample(model, processor, images, policy_version=update)
        check_exact(trajectories, model, processor, dtype)
        metrics = trainer.update(trajectories)
        assert metrics["is_skipped"] == 0
        assert math.isfinite(metrics["loss"])


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_of_the_real_vocabulary_in_chunks_equal_those_computed_at_once(dtype: str) -> None:
    need_dtype(dtype)
    vocab_size, num_tokens = 151_936, MAX_CHUNK_LOGITS // 151_936 + 60
    torch.manual_seed(0)
    head = torch.nn.Linear(64, vocab_size, bias=False, dtype=DTYPES[dtype])
    hidden = torch.randn(num_tokens, 64, dtype=DTYPES[dtype])
    targets = torch.randint(vocab_size, (num_tokens,))
    found = {}
    for name, max_chunk_logits in (("chunks", MAX_CHUNK_LOGITS), ("at once", 1 << 30)):
        head.weight.grad, inputs = None, hidden.clone().requires_grad_()
        logprobs, entropy = token_logprobs(
            inputs, targets, head, vocab_size=vocab_size, with_entropy=True, max_chunk_logits=max_chunk_logits
        )
        (logprobs.sum() + entropy.sum()).backward()
        assert inputs.grad is not None
        assert head.weight.grad is not None
        found[name] = (logprobs.detach(), entropy.detach(), inputs.grad, head.weight.grad)
    for part, whole in zip(found["chunks"], found["at once"], strict=True):
        assert part.dtype == whole.dtype
        # In bfloat16 the gradients of the weights are summed chunk by chunk and rounded once more.
        tolerance = 1e-5 if part.dtype == torch.float32 else 2e-2
        torch.testing.assert_close(part, whole, rtol=tolerance, atol=tolerance)
    assert found["chunks"][0].dtype == torch.float32


def test_an_embedding_larger_than_the_tokenizer_never_gives_an_id_without_text(processor: Any) -> None:
    """267 rows of the published embedding belong to no token. Even where they are by far the likeliest, none is
    sampled, and the trainer agrees with the sampler on the sampled tokens."""
    model = build_model(THIN, device="cpu", dtype=torch.float32)
    with torch.no_grad():
        likely = torch.zeros(64)
        likely[0] = 4.0
        model.lm_head.weight[len(processor.tokenizer) :] = likely
    trajectories = sample(model, processor, [[screen(0, (512, 320))], [screen(1, (512, 320))]], num_tokens=24)
    for trajectory in trajectories:
        assert max(trajectory.token_ids) < len(processor.tokenizer)
    check_exact(trajectories, model, processor, "float32")


def test_trainer_log_probabilities_are_over_every_row_of_the_embedding(processor: Any, renderer: Renderer) -> None:
    """Log-probabilities are over all 151,936 rows (or those that may be sampled), not over the tokenizer's."""
    model = build_model(THIN, device="cpu", dtype=torch.float32, sharpness=0.0)
    (logprobs,) = score_trajectories(model, processor, [demonstration(renderer, "d", [screen(0, (512, 320))])])
    said = logprobs[logprobs != 0]
    # A flat distribution: each of the V rows is as likely as any other.
    assert -math.log(151_936) - 1e-3 <= float(said.min()) <= float(said.max()) <= -math.log(151_667) + 1e-3
