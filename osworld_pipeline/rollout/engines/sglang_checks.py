"""Checks, by their effect, two settings that no endpoint of sglang reports and that silently make training wrong.

SGLANG_RETURN_ORIGINAL_LOGPROB=1: log-probabilities are those before temperature, not those that were sampled from.
SGLANG_VLM_CACHE_SIZE_MB above 0 (the default): after a change of the vision tower, cached image features are stale.
"""

import asyncio
import functools
import io
import math
import random
import shutil
import struct
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from osworld_pipeline.agent.renderer import Renderer
from osworld_pipeline.domain.episode import SamplingParams
from osworld_pipeline.errors import EngineError
from osworld_pipeline.protocols import GenerateRequest
from osworld_pipeline.rollout.engines.http_calls import TransientError, shown
from osworld_pipeline.rollout.engines.safetensors_header import encode_tensor, read_header
from osworld_pipeline.rollout.engines.sglang_loading import LoadWeights
from osworld_pipeline.rollout.engines.sglang_messages import generate_body, read_scores
from osworld_pipeline.rollout.engines.sglang_server import SglangServer

WARM, HOT = 2.0, 8.0
"""Temperatures: at HOT, log-probabilities after temperature are a quarter as far apart as at WARM. Both are above 1,
because below it the values of unlikely ids may be too small to compare."""
LEAST_SPREAD = 1e-4
"""Minimum spread of log-probabilities at which a scale is detectable."""
IMAGE_SIDE = 256
NUM_WATCHED = 32
"""Ids whose log-probabilities are compared."""
VISION_BIAS = "visual.merger.linear_fc2.bias"
"""The last parameter of the vision tower."""
SHIFT = 10.0
"""Added to the bias: far more than training changes it."""
LEAST_CHANGE = 1e-3
"""Minimum change of a log-probability by such a shift; it was 0.35 with a model of untrained weights."""


async def check_logprob_scale(
    server: SglangServer, renderer: Renderer, banned_ids: Sequence[int], *, timeout_s: float
) -> None:
    """
    Raises:
        EngineError: the server's log-probabilities are not those of its sampling distribution; names the setting.
        TransientError: it did not answer.
    """
    score = functools.partial(_score, server, renderer, banned_ids, (), timeout_s=timeout_s)
    warm, hot = await score(temperature=WARM), await score(temperature=HOT)
    # The ratio of the spreads is 1 for log-probabilities before temperature, and HOT / WARM for those after it.
    if _spread(warm) > LEAST_SPREAD and _spread(warm) / max(_spread(hot), 1e-9) < math.sqrt(HOT / WARM):
        raise EngineError(
            f"the sglang server at {shown(server.url)} returns log-probabilities before temperature, not those of its "
            "sampling distribution: start it without SGLANG_RETURN_ORIGINAL_LOGPROB=1"
        )


async def vision_cache_problem(
    server: SglangServer,
    renderer: Renderer,
    banned_ids: Sequence[int],
    path: Path,
    *,
    load: LoadWeights,
    timeout_s: float,
) -> str | None:
    """Describes the problem of the server's vision cache; None if there is none. Shifts one bias of the vision tower:
    weights must be loaded afterwards in any case.

    `path`: a checkpoint, for the name and the shape of that bias. The shifted bias is written to a folder next to it;
    the server must be able to read that folder if `load` is `FromFolder`.

    Raises:
        TransientError, EngineError: the check could not be completed.
    """
    bias = await asyncio.to_thread(_vision_bias, path)
    if bias is None:
        return None
    image = await asyncio.to_thread(_noise_png)
    score = functools.partial(_score, server, renderer, banned_ids, (image,), temperature=1.0, timeout_s=timeout_s)
    before = await score()
    folder = await asyncio.to_thread(_write_shifted, path.parent, *bias)
    try:
        await load(server, folder, f"check-{uuid.uuid4().hex[:8]}")
    except TransientError:
        raise
    except EngineError as error:
        raise EngineError(f"the vision cache of {shown(server.url)} cannot be checked: {error}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    after = await score()
    change = max(abs(one - other) for one, other in zip(before, after, strict=True))
    if change >= LEAST_CHANGE:
        return None
    return (
        f"the sglang server at {shown(server.url)} caches image features across weight updates, and {path} "
        "has another vision tower than the weights before: start it with SGLANG_VLM_CACHE_SIZE_MB=0, or, if the vision "
        "tower is frozen, on a checkpoint with the same tower"
    )


async def _score(
    server: SglangServer,
    renderer: Renderer,
    banned_ids: Sequence[int],
    images: tuple[bytes, ...],
    *,
    temperature: float,
    timeout_s: float,
) -> list[float]:
    """Log-probabilities of the watched ids after a short prompt."""
    prompt = [token_id for _ in images for token_id in renderer.image_ids(width=IMAGE_SIDE, height=IMAGE_SIDE)]
    request = GenerateRequest(
        sampling=SamplingParams(temperature=temperature, max_new_tokens=1, stop=()),
        token_ids=(*prompt, *renderer.encode("What do you see?")),
        images=images,
    )
    banned = frozenset(banned_ids)
    allowed = [token_id for token_id in range(len(renderer.tokenizer)) if token_id not in banned]
    watched = allowed[:: max(1, len(allowed) // NUM_WATCHED)][:NUM_WATCHED]
    body = generate_body(request, renderer, banned_ids=banned_ids, token_ids_logprob=watched)
    answer = await server.generate(body, timeout_s=timeout_s)
    try:
        return read_scores(answer)
    except TransientError as error:
        raise TransientError(f"{shown(server.url)}: {error}") from error


def _spread(values: list[float]) -> float:
    return max(values) - min(values)


def _noise_png() -> bytes:
    """An image that no server has cached."""
    buffer = io.BytesIO()
    pixels = random.randbytes(IMAGE_SIDE * IMAGE_SIDE * 3)
    Image.frombytes("RGB", (IMAGE_SIDE, IMAGE_SIDE), pixels).save(buffer, format="PNG", compress_level=1)
    return buffer.getvalue()


def _vision_bias(path: Path) -> tuple[str, tuple[int, ...]] | None:
    """Name and shape of the vision tower's last bias in a checkpoint; None for a model without a vision tower.

    Raises:
        EngineError: the checkpoint cannot be read.
    """
    spans = [span for file in sorted(path.glob("*.safetensors")) for span in read_header(file)]
    return next(((span.name, span.shape) for span in spans if span.name.endswith(VISION_BIAS)), None)


def _write_shifted(parent: Path, name: str, shape: tuple[int, ...]) -> Path:
    """A checkpoint with only that bias, next to the real one, so that servers that see one see the other."""
    num_values = math.prod(shape)
    values = struct.pack(f"<{num_values}f", *(SHIFT if index % 2 else -SHIFT for index in range(num_values)))
    try:
        folder = Path(tempfile.mkdtemp(prefix=".vision-check-", dir=parent))
        folder.chmod(0o755)
        (folder / "model.safetensors").write_bytes(encode_tensor(name, shape, values))
    except OSError as error:
        raise EngineError(f"the vision cache cannot be checked: nothing can be written to {parent}: {error}") from error
    return folder
