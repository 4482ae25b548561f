"""A really tiny random Qwen3-VL, made once for the tests that render or encode."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from osworld_pipeline.recipes.schema import TinyModelSection


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch

    from osworld_pipeline.training.tiny_model import build_tiny_checkpoint

    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("tiny") / "checkpoint"
    spec = TinyModelSection(
        kind="tiny", hidden_size=64, num_layers=2, vision_hidden_size=48, vision_depth=1, vocab_size=512
    )
    build_tiny_checkpoint(folder, spec, ["Action: rename the folder\n[Task]\nRename the folder alpha to bravo."])
    return folder


@pytest.fixture(scope="session")
def processor(tiny_folder: Path) -> Any:
    from osworld_pipeline.agent.processor import load_processor

    return load_processor(tiny_folder)


@pytest.fixture(scope="session")
def noise_png() -> Callable[[int, int, int], bytes]:
    """PNG of (width, height) with noise from a seed."""

    def make(width: int, height: int, seed: int) -> bytes:
        pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, format="PNG")
        return buffer.getvalue()

    return make
