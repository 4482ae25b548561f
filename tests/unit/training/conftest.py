"""A really tiny Qwen3-VL, built once for all tests of training, and trajectories made with its own processor."""

from pathlib import Path

import pytest
import torch
from training_samples import CORPUS, SMALL

from osworld_pipeline.agent.processor import load_processor
from osworld_pipeline.training.model import load_model
from osworld_pipeline.training.tiny.model import build_tiny_checkpoint


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "model"
    build_tiny_checkpoint(folder, SMALL, CORPUS)
    return folder


@pytest.fixture(scope="session")
def processor(tiny_folder: Path):
    return load_processor(tiny_folder)


@pytest.fixture
def model(tiny_folder: Path):
    """A fresh model for each test, because tests may train it."""
    return load_model(tiny_folder)
