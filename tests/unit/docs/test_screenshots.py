"""Pictures of the documentation are small, and made by a script that says what it could not take."""

import importlib.util
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parents[3]
SPEC = importlib.util.spec_from_file_location("make_screenshots", ROOT / "docs/make_screenshots.py")
assert SPEC is not None
assert SPEC.loader is not None
make_screenshots = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(make_screenshots)


def png(pixels: np.ndarray) -> bytes:
    sink = io.BytesIO()
    Image.fromarray(pixels).save(sink, "PNG")
    return sink.getvalue()


def test_every_picture_of_the_documentation_is_small() -> None:
    pictures = sorted((ROOT / "docs").glob("*.png"))
    assert len(pictures) >= 3
    assert {path.name: path.stat().st_size for path in pictures if path.stat().st_size > 250_000} == {}


def test_a_shrunk_picture_has_few_bytes_and_keeps_its_dimensions() -> None:
    rows = np.linspace(0, 255, 768, dtype=np.uint8)
    pixels = np.stack([np.repeat(rows[:, None], 1366, axis=1)] * 3, axis=2)
    small = make_screenshots.shrink(png(pixels))
    assert len(small) <= make_screenshots.MAX_BYTES
    with Image.open(io.BytesIO(small)) as image:
        assert image.size == (1366, 768)


def test_a_picture_that_cannot_be_small_is_refused() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    with pytest.raises(make_screenshots.ScreenshotError, match="show less of the page"):
        make_screenshots.shrink(png(noise), max_bytes=300)
