"""The part of the GPU measurement that samples from an sglang server: the trainer's log-probabilities against those of
a server that loaded the same weights. sglang needs a separate environment, which this module does not create."""

import os
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import torch

from benchmarks.gpu_bench import Bench, num_sampled, stopwatch
from benchmarks.gpu_sheet import NotMeasured, Sheet
from benchmarks.gpu_size import Size
from benchmarks.processes import BenchmarkError, started
from osworld_pipeline.recipes.schema import EngineSection
from osworld_pipeline.rollout.engines.sglang import SglangEngine
from osworld_pipeline.runs.parity.exactness import compare_trajectories

PYTHON_VARIABLE = "OSWORLD_SGLANG_PYTHON"
"""Names the interpreter of an environment in which sglang is installed with CUDA."""
START_TIMEOUT_S = 150.0
MAX_MEAN_DIFF = 0.03
"""Other kernels round differently."""
MEMORY_SHARE = 0.4
"""Share of the device for the server's weights, keys and values; the trainer's model uses the rest."""


def sglang(size: Size, processor_folder: Path, sheet: Sheet) -> None:
    named = os.environ.get(PYTHON_VARIABLE)
    if not named or not Path(named).exists():
        raise NotMeasured(
            f"no sglang here: install it into a separate environment and name its python in {PYTHON_VARIABLE}"
        )
    if not torch.cuda.is_available():
        raise NotMeasured("for a server on a CPU run make test-sglang")
    bench = Bench(size, processor_folder)
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as place:
        folder = Path(place) / "checkpoint"
        bench.model.save_pretrained(folder)
        bench.processor.save_pretrained(folder)
        with running_server(named, folder) as url:
            engine = SglangEngine(
                (url,),
                renderer=bench.renderer,
                section=EngineSection(kind="sglang", urls=(url,)),
                vocab_size=bench.model.config.text_config.vocab_size,
            )
            with bench.looped(engine):
                bench.sample(engine, "warm")
                with stopwatch() as seconds:
                    trajectories = bench.sample(engine, "served")
    sheet.figure("sampled tokens a second", f"{num_sampled(trajectories) / seconds[0]:.0f}")
    report = compare_trajectories(trajectories, bench.model, bench.processor, cache=bench.cache)
    text = f"mean {report.mean_diff:.2g}, largest {report.max_diff:.2g}, {report.num_tokens} tokens"
    sheet.figure("|trainer - sglang| of a log-probability", text)
    sheet.claim(f"at most {MAX_MEAN_DIFF} on average", report.mean_diff <= MAX_MEAN_DIFF)


@contextmanager
def running_server(python: str, checkpoint: Path) -> Iterator[str]:
    """Raises BenchmarkError."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [
        python, "-m", "sglang.launch_server", "--model-path", str(checkpoint), "--host", "127.0.0.1",
        "--port", str(port), "--dtype", "bfloat16", "--enable-fp32-lm-head", "--mem-fraction-static", str(MEMORY_SHARE),
        "--context-length", "16384", "--disable-cuda-graph", "--log-level", "warning",
    ]  # fmt: skip
    environment = {"HF_HUB_OFFLINE": "1"}
    with started(command, environment=environment) as server:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not _is_up(url):
            if server.process.poll() is not None or time.monotonic() > deadline:
                raise BenchmarkError(f"sglang did not start: {server.stderr_tail()}")
            time.sleep(0.5)
        yield url


def _is_up(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5, trust_env=False).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False
