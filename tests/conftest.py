"""Shared by all tests: what this machine can run, where real data may lie, and a really tiny random Qwen3-VL."""

import io
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from osworld_pipeline.recipes.schema import TinyModelSection

REAL_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
SECONDS = {
    "test_real_shapes": 370, "test_qemu_desktop": 300, "test_evaluate_command": 180, "test_demo_kills": 140,
    "test_suite_oracles": 130, "test_ray_launcher": 120, "test_collect_command": 110, "test_gpu_smoke": 100,
    "test_local_desktop": 90, "test_two_states": 90, "test_exactness": 80, "test_real_osworld_tasks": 60,
    "test_two_ranks": 60, "test_person_demonstration": 120, "test_person_takeover": 40,
    "test_gateway": 50, "test_verified_replay": 40, "test_env_server_faults": 40, "test_reference_surfaces": 40,
    "test_push_and_pull": 40, "test_parity_probe": 40, "test_gspo_phase": 40, "test_training_gspo_learns": 30,
    "test_training_sft_resume": 30, "test_tiny_pretraining": 30, "test_migration": 30, "test_released_states": 40,
    "test_released_state_goes_on": 90,
}  # fmt: skip
"""About what the longest files take on two cores beside two others (`make test` tells the longest tests)."""
IS_ONE_OF_SEVERAL_WORKERS = "PYTEST_XDIST_WORKER" in os.environ
if IS_ONE_OF_SEVERAL_WORKERS:
    # Before torch is imported, and for the programs that tests start: threads that share a core wait for each other
    # busily, and a tiny model's update takes ten times as long.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
DESKTOP_PROGRAMS = ("bwrap", "Xvfb", "openbox", "xterm", "mousepad", "pcmanfm", "yad")


def pytest_configure(config: pytest.Config) -> None:
    """A shell's background job begins with SIGINT ignored; Dagster then has SIGTERM ignored, too, and so would every
    program that a test starts and tells to end. GPUs are hidden from the tests that compare runs bit by bit, which a
    GPU's kernels do not promise."""
    if "gpu" not in config.option.markexpr and Path("/dev/nvidiactl").exists():
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Fast tests first; a test that needs what is not here is skipped and says what is missing."""
    missing = [program for program in DESKTOP_PROGRAMS if shutil.which(program) is None]
    for item in items:
        if item.get_closest_marker("desktop") and missing:
            item.add_marker(
                pytest.mark.skip(reason=f"no desktop here: {', '.join(missing)} (osworld-pipeline setup debian)")
            )
        if item.get_closest_marker("gpu") and not _has_cuda():
            item.add_marker(pytest.mark.skip(reason="no CUDA device, or not run by `make test-gpu`"))
        if item.get_closest_marker("browser") and shutil.which("chromium") is None:
            item.add_marker(pytest.mark.skip(reason="no chromium"))
    items.sort(key=_cost)


def _cost(item: pytest.Item) -> tuple[int, int]:
    """Of several workers each takes whole files: the longest come first, so that all workers end at about the same
    time."""
    seconds = SECONDS.get(item.path.stem, 0) if IS_ONE_OF_SEVERAL_WORKERS else 0
    return -seconds, 2 * bool(item.get_closest_marker("slow")) + bool(item.get_closest_marker("desktop"))


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture
def real_data() -> Path:
    """Real OSWorld tasks and a real trajectory, where they are."""
    if not REAL_DATA.is_dir():
        pytest.skip(f"no real data at {REAL_DATA}")
    return REAL_DATA


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch

    from osworld_pipeline.training.tiny.model import build_tiny_checkpoint

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
