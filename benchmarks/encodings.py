"""Cost of a picture of a real desktop in each format: in the guest, grabbing and sending included, and for formats
that the guest does not offer, with Pillow on the same pixels."""

import asyncio
import io
import time
from collections.abc import Mapping, Sequence
from typing import Any

from PIL import Image
from rich.console import Console

from benchmarks.spread import Spread, print_table
from env_server.protocols import ProvidedDesktop
from osworld_pipeline.wire import ImageFormat

REPEATS = 9
OFFERED: tuple[tuple[ImageFormat, int | None], ...] = (
    ("png", None), ("jpeg", 75), ("jpeg", 85), ("jpeg", 95), ("webp", 60), ("webp", 80), ("webp", 95),
)  # fmt: skip
COMPARED: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("PNG level 1, Pillow's filters", "PNG", {"compress_level": 1}),
    ("PNG level 6, Pillow's filters", "PNG", {"compress_level": 6}),
    ("WebP lossless, method 0", "WEBP", {"lossless": True, "method": 0, "quality": 0}),
    ("WebP q80, method 4", "WEBP", {"quality": 80, "method": 4}),
)


async def run_encodings(
    console: Console, desktop: ProvidedDesktop, windows: Sequence[Mapping[str, Any]], screen: tuple[int, int]
) -> list[dict[str, Any]]:
    for verb in windows:
        if verb["type"] == "launch":
            await desktop.guest.launch(verb["parameters"]["command"])
    await asyncio.sleep(2.0)
    rows, results = [], []
    for image_format, quality in OFFERED:
        times_ms, picture = [], b""
        for _ in range(REPEATS):
            start = time.perf_counter()
            picture = await desktop.guest.screenshot(image_format, quality=quality)
            times_ms.append((time.perf_counter() - start) * 1e3)
        name = f"{image_format}{'' if quality is None else f' q{quality}'} from the guest"
        _add(name, times_ms, len(picture), rows, results)
    pixels = Image.open(io.BytesIO(await desktop.guest.screenshot("png"))).convert("RGB")
    for name, image_format, options in COMPARED:
        times_ms, num_bytes = await asyncio.to_thread(_encode, pixels, image_format, options)
        _add(f"{name} (not offered)", times_ms, num_bytes, rows, results)
    size = f"{screen[0]}x{screen[1]} ({_raw_mb(screen):.1f} MB raw)"
    title = f"One {size} screenshot with three windows, {REPEATS} times"
    print_table(console, title, ("encoding", "ms p50 [p25..p75]", "kB"), rows)
    return results


def _encode(pixels: Image.Image, image_format: str, options: dict[str, Any]) -> tuple[list[float], int]:
    times_ms, num_bytes = [], 0
    for _ in range(REPEATS):
        buffer = io.BytesIO()
        start = time.perf_counter()
        pixels.save(buffer, image_format, **options)
        times_ms.append((time.perf_counter() - start) * 1e3)
        num_bytes = buffer.tell()
    return times_ms, num_bytes


def _add(
    name: str, times_ms: list[float], num_bytes: int, rows: list[tuple[str, ...]], results: list[dict[str, Any]]
) -> None:
    spread = Spread.of(times_ms)
    rows.append((name, spread.quartile_text(), f"{num_bytes / 1e3:.0f}"))
    results.append({"bench": "encoding", "figure": name, "unit": "ms", "bytes": num_bytes, **spread.fields()})


def _raw_mb(screen: tuple[int, int]) -> float:
    return screen[0] * screen[1] * 3 / 1e6
