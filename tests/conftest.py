"""Fixtures shared by all tests: what this machine can run, where real data may be, and a very tiny random Qwen3-VL."""

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

from osworld_pipeline.programs.short_process import collect_seldom
from osworld_pipeline.recipes.schema import TinyModelSection

REAL_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
SECONDS = {
    "test_real_shapes": 340, "test_qemu_desktop": 350, "test_ray_placement": 300, "test_suite_oracles": 210,
    "test_ray_launcher": 190, "test_evaluate_command": 170, "test_wheel": 140, "test_demo_kills": 130,
    "test_released_state_goes_on": 120, "test_hostile_policy": 110, "test_gpu_smoke": 100,
    "test_person_demonstration": 100, "test_collect_command": 100, "test_two_states": 90, "test_sglang_broadcast": 80,
    "test_local_desktop": 75, "test_env_server": 70, "test_gspo_phase": 60, "test_parity_probe": 60,
    "test_kept_cases": 60, "test_server_changes": 60, "test_exactness": 60, "test_settling": 55, "test_viewer": 55,
    "test_gateway": 45, "test_live_page": 45, "test_migration": 40, "test_state_without_locks": 40,
    "test_status_page": 40, "test_host_faults": 35, "test_push_and_pull": 35, "test_reference_surfaces": 35,
    "test_command_line": 35, "test_released_states": 35, "test_training_sft_resume": 35, "test_kubernetes": 35,
    "test_parity_servers": 35, "test_equal_answers": 30, "test_compaction": 30, "test_env_server_faults": 30,
    "test_machine_answers": 30, "test_tracking": 30, "test_verified_replay": 30, "test_two_ranks": 30,
}  # fmt: skip
"""Roughly what the longest files take on two cores next to two others (`make test` prints the longest tests)."""
IS_ONE_OF_SEVERAL_WORKERS = "PYTEST_XDIST_WORKER" in os.environ
if IS_ONE_OF_SEVERAL_WORKERS:
    # Set before torch is imported, and for the programs that tests start: threads that share a core busy-wait for each
    # other, and a tiny model's update takes ten times as long.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
DESKTOP_PROGRAMS = ("bwrap", "Xvfb", "openbox", "xterm", "mousepad", "pcmanfm", "yad")


def pytest_configure(config: pytest.Config) -> None:
    """A shell's background job starts with SIGINT ignored. Dagster then ignores SIGTERM, too, and so would each program
    that a test starts and stops. GPUs are hidden from the tests that compare runs bit by bit, because a GPU's kernels
    do not guarantee equal bits."""
    if "gpu" not in config.option.markexpr and Path("/dev/nvidiactl").exists():
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    collect_seldom()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs fast tests first. Skips a test whose requirements are missing here and names what is missing."""
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
    """Each of several workers takes whole files. The longest files come first, so that all workers end at about the
    same time."""
    seconds = SECONDS.get(item.path.stem, 0) if IS_ONE_OF_SEVERAL_WORKERS else 0
    return -seconds, 2 * bool(item.get_closest_marker("slow")) + bool(item.get_closest_marker("desktop"))


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture
def real_data() -> Path:
    """The folder of real OSWorld tasks and a real trajectory. Skips the test where it is missing."""
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
