"""Two settings that an sglang server does not tell, and without which training goes wrong silently: seen by their
effect.

SGLANG_RETURN_ORIGINAL_LOGPROB=1: without it log-probabilities are those after temperature, which no trainer recomputes.
SGLANG_VLM_CACHE_SIZE_MB=0: without it an image seen before a weight update keeps what the old vision tower made of it.
"""

import asyncio
import io
import json
import math
import random
import shutil
import struct
import tempfile
import uuid
from pathlib import Path
from typing import Any

from PIL import Image

from osworld_pipeline.agent.renderer import Renderer
from osworld_pipeline.domain.episode import SamplingParams
from osworld_pipeline.errors import EngineError
from osworld_pipeline.protocols import GenerateRequest
from osworld_pipeline.rollout.engines.http_calls import TransientError, shown
from osworld_pipeline.rollout.engines.sglang_messages import generate_body
from osworld_pipeline.rollout.engines.sglang_server import SglangServer

COLD = 0.1
"""A temperature at which log-probabilities after temperature lie ten times as far apart."""
IMAGE_SIDE = 256
NUM_WATCHED = 32
"""Ids whose log-probabilities are compared."""
VISION_BIAS = "visual.merger.linear_fc2.bias"
"""The vision tower's output ends with it."""
SHIFT = 10.0
"""By which it is moved: far more than any training moves it."""
LEAST_CHANGE = 1e-3
"""Of a log-probability, that such a shift brings about at least; it was 0.35 with a model of untrained weights."""


async def check_logprob_scale(server: SglangServer, renderer: Renderer, *, timeout_s: float) -> None:
    """
    Raises:
        EngineError: the server's log-probabilities are not those of the raw logits; names the variable.
        TransientError: it did not answer.
    """
    warm = await _score(server, renderer, (), temperature=1.0, timeout_s=timeout_s)
    cold = await _score(server, renderer, (), temperature=COLD, timeout_s=timeout_s)
    ratio = _spread(cold) / max(_spread(warm), 1e-9)
    # 1 for raw logits, 1 / COLD after temperature.
    if ratio > math.sqrt(1 / COLD):
        raise EngineError(
            f"the sglang server at {shown(server.url)} gives log-probabilities after temperature, which no trainer "
            "recomputes: start it with SGLANG_RETURN_ORIGINAL_LOGPROB=1"
        )


async def vision_cache_problem(server: SglangServer, renderer: Renderer, path: Path, *, timeout_s: float) -> str | None:
    """What is wrong with the server's vision cache, None where nothing is. Moves one bias of the vision tower: weights
    must be loaded afterwards, whatever came of it.

    `path`: a checkpoint, for the name and the shape of that bias; the server must see what is written beside it.

    Raises:
        TransientError, EngineError: the check could not be made.
    """
    bias = await asyncio.to_thread(_vision_bias, path)
    if bias is None:
        return None
    image = await asyncio.to_thread(_noise_png)
    before = await _score(server, renderer, (image,), temperature=1.0, timeout_s=timeout_s)
    folder = await asyncio.to_thread(_write_shifted, path.parent, *bias)
    try:
        await server.load_weights(folder, f"check-{uuid.uuid4().hex[:8]}")
    except TransientError:
        raise
    except EngineError as error:
        raise EngineError(f"the vision cache of {shown(server.url)} cannot be checked: {error}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    after = await _score(server, renderer, (image,), temperature=1.0, timeout_s=timeout_s)
    change = max(abs(one - other) for one, other in zip(before, after, strict=True))
    if change >= LEAST_CHANGE:
        return None
    return (
        f"the sglang server at {shown(server.url)} keeps what the vision tower made of an image across weight updates: "
        "start it with SGLANG_VLM_CACHE_SIZE_MB=0, or freeze the vision tower"
    )


async def _score(
    server: SglangServer, renderer: Renderer, images: tuple[bytes, ...], *, temperature: float, timeout_s: float
) -> list[float]:
    """Log-probabilities of the watched ids after a short prompt."""
    prompt = [token_id for _ in images for token_id in renderer.image_ids(width=IMAGE_SIDE, height=IMAGE_SIDE)]
    request = GenerateRequest(
        sampling=SamplingParams(temperature=temperature, max_new_tokens=1, stop=()),
        token_ids=(*prompt, *renderer.encode("What do you see?")),
        images=images,
    )
    step = max(1, len(renderer.tokenizer) // NUM_WATCHED)
    watched = list(range(0, len(renderer.tokenizer), step))[:NUM_WATCHED]
    body = generate_body(request, renderer, seed=0, token_ids_logprob=watched)
    answer = await server.generate(body, timeout_s=timeout_s)
    try:
        entries = answer["meta_info"]["output_token_ids_logprobs"][0]
        return [float(entry[0]) for entry in entries]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise TransientError(
            f"the sglang server at {shown(server.url)} does not score tokens that it is asked for"
        ) from error


def _spread(values: list[float]) -> float:
    return max(values) - min(values)


def _noise_png() -> bytes:
    """An image that no server has seen."""
    buffer = io.BytesIO()
    pixels = random.randbytes(IMAGE_SIDE * IMAGE_SIDE * 3)
    Image.frombytes("RGB", (IMAGE_SIDE, IMAGE_SIDE), pixels).save(buffer, format="PNG", compress_level=1)
    return buffer.getvalue()


def _vision_bias(path: Path) -> tuple[str, list[int]] | None:
    """Its name and shape in a checkpoint; None of a model without one.

    Raises:
        EngineError: the checkpoint cannot be read.
    """
    shapes: dict[str, list[int]] = {}
    for file in sorted(path.glob("*.safetensors")):
        try:
            with file.open("rb") as opened:
                (length,) = struct.unpack("<Q", opened.read(8))
                header: dict[str, Any] = json.loads(opened.read(length))
        except (OSError, ValueError, struct.error) as error:
            raise EngineError(f"the checkpoint at {path} cannot be read: {error}") from error
        shapes |= {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}
    if not shapes:
        raise EngineError(f"no weights (*.safetensors) at {path}")
    for name, shape in shapes.items():
        if name.endswith(VISION_BIAS):
            return name, shape
    return None


def _write_shifted(parent: Path, name: str, shape: list[int]) -> Path:
    """A checkpoint of that bias alone, beside the real one: servers that see the one see the other."""
    num_values = math.prod(shape)
    data = struct.pack(f"<{num_values}f", *(SHIFT if index % 2 else -SHIFT for index in range(num_values)))
    header = json.dumps({name: {"dtype": "F32", "shape": shape, "data_offsets": [0, len(data)]}}).encode()
    header += b" " * (-len(header) % 8)
    try:
        folder = Path(tempfile.mkdtemp(prefix=".vision-check-", dir=parent))
        folder.chmod(0o755)
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + data)
    except OSError as error:
        raise EngineError(f"the vision cache cannot be checked: nothing can be written to {parent}: {error}") from error
    return folder
