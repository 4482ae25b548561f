"""Sizes of the GPU measurement: the published shape on a GPU, adapted to its memory, or a thin one that a CPU runs
in a minute; and the memory estimate of both."""

from dataclasses import dataclass, field, replace

import torch

from benchmarks.real_shape import Architecture, UpdateKind
from osworld_pipeline.recipes import load_recipe
from osworld_pipeline.recipes.schema import LoraSection
from osworld_pipeline.training.memory.estimate import GB, estimate
from osworld_pipeline.training.memory.model_shapes import ModelShape

PEAK_TFLOPS = {
    "H100 PCIe": 756.5, "H100 NVL": 835.5, "H100": 989.4, "H200": 989.4, "B200": 2250.0, "A100": 312.0, "L40S": 362.0,
    "L4": 121.0, "A10": 125.0,
}  # fmt: skip
"""Dense bfloat16 by part of the device's name, first match (NVIDIA's data sheets); plain H100 is the SXM version."""
USABLE = 0.96
"""Share of a device's memory that an estimate may fill."""


@dataclass(frozen=True, kw_only=True)
class Size:
    name: str
    architecture: Architecture = field(default_factory=Architecture)
    context: int = 8192
    """Tokens of a sequence whose update is timed."""
    num_sequences: int = 4
    """Sequences of such an update."""
    limit_factor: float = 1.0
    """Factor of the time limits, of each part and of all parts together."""
    num_updates: int = 2
    """Timed updates, after a warm-up."""
    screen: tuple[int, int] = (1280, 720)
    num_episodes: int = 4
    """Concurrent episodes for exactness."""
    num_exact_updates: int = 3
    """Updates of the exactness parts; trainer and sampler are compared before the first and after each."""
    num_turns: int = 3
    max_new_tokens: int = 48
    largest_context: int = 65_536
    """Longer ones are not tried."""
    context_step: int = 2048
    num_packed: int = 16
    lora: LoraSection = field(default_factory=lambda: LoraSection(rank=32, alpha=64))


FULL = Size(name="full")
SMOKE = Size(
    name="smoke",
    limit_factor=10.0,
    architecture=Architecture(
        hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4, num_kv_heads=2, vision_depth=3,
        vision_hidden_size=64, vision_intermediate_size=128, vision_heads=4, deepstack_layers=(0, 1),
    ),
    context=1024, num_sequences=2, num_updates=1, num_exact_updates=1,
    screen=(256, 192), num_episodes=2, num_turns=2, max_new_tokens=6,
    largest_context=1536, context_step=512, num_packed=3, lora=LoraSection(rank=4, alpha=8),
)  # fmt: skip
SIZES = {size.name: size for size in (FULL, SMOKE)}


def device() -> torch.device:
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def device_name() -> str:
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else "CPU"


def device_bytes() -> int | None:
    """None on a CPU."""
    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None


def peak_tflops(name: str) -> float | None:
    """None for a device that is not listed."""
    return next(
        (peak for part, peak in PEAK_TFLOPS.items() if set(part.split()) <= set(name.replace("-", " ").split())), None
    )


def estimated_bytes(size: Size, kind: UpdateKind, *, context: int) -> int:
    """The estimate of training/memory/estimate.py for an update with one sequence a pass, without an engine."""
    settings = [
        "engine.kind=sglang", 'engine.urls=["http://127.0.0.1"]', "trainer.num_processes=1",
        "trainer.cpu_offload=false", "gspo.kl_coef=0", "gspo.micro_batch_size=1", "agent.context_mode=append",
        f"agent.max_context_tokens={context}", f"trainer.max_tokens_per_batch={context}", f"agent.max_turns={context}",
        f"desktop.screen_width={size.screen[0]}", f"desktop.screen_height={size.screen[1]}",
    ]  # fmt: skip
    if kind.endswith("lora"):
        settings.append(f"trainer.lora.rank={size.lora.rank}")
    recipe = load_recipe("qwen3vl_4b_lora" if kind.endswith("lora") else "qwen3vl_4b", settings=settings)
    shape = ModelShape.of_config(size.architecture.config().to_dict())
    return estimate(recipe, shape, "sft" if kind.startswith("sft") else "gspo").gpu_bytes


def fitted(size: Size, kind: UpdateKind, *, context: int, num_bytes: int | None) -> Size:
    """The size with as many layers as fit on a device of `num_bytes` by the estimate; all layers for None, a CPU."""
    if num_bytes is None:
        return size
    for num_layers in range(size.architecture.num_layers, 1, -1):
        smaller = replace(size, architecture=replace(size.architecture, num_layers=num_layers))
        if estimated_bytes(smaller, kind, context=context) <= USABLE * num_bytes:
            return smaller
    return replace(size, architecture=replace(size.architecture, num_layers=1))


def shown_gb(num_bytes: float) -> str:
    return f"{num_bytes / GB:.1f} GB"
