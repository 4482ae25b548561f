"""Screenshots for the model: size limits, exact bytes, and points that map back to the screen."""

import io
from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image

from osworld_pipeline.agent.images import fit_size, prepare_screenshot
from osworld_pipeline.domain.digest import digest_bytes

Noise = Callable[[int, int, int], bytes]


@given(width=st.integers(1, 8000), height=st.integers(1, 8000), max_pixels=st.integers(1024, 2_000_000))
@example(width=8000, height=1, max_pixels=1024)
def test_a_fitted_size_is_divisible_by_32_and_within_the_limit(width: int, height: int, max_pixels: int) -> None:
    fit_width, fit_height = fit_size(width, height, max_pixels)
    assert fit_width % 32 == fit_height % 32 == 0
    assert fit_width >= 32
    assert fit_height >= 32
    assert fit_width * fit_height <= max_pixels


def test_full_hd_fits_the_published_limit_at_1312_by_736() -> None:
    assert fit_size(1920, 1080, 1_003_520) == (1312, 736)


def test_a_screenshot_that_fits_keeps_its_exact_bytes(noise_png: Noise) -> None:
    data = noise_png(64, 32, 0)
    image = prepare_screenshot(data, 163_840)
    assert image.data == data
    assert (image.width, image.height, image.num_tokens, image.format) == (64, 32, 2, "png")
    assert image.sha256 == digest_bytes(data)
    assert image.to_screen(13, 7) == (13, 7)


def test_a_screenshot_that_is_too_large_becomes_smaller_without_other_loss(noise_png: Noise) -> None:
    data = noise_png(200, 100, 0)
    image = prepare_screenshot(data, 64 * 32)
    assert (image.width, image.height, image.format) == (64, 32, "webp")
    with Image.open(io.BytesIO(image.data)) as opened, Image.open(io.BytesIO(data)) as screen:
        assert opened.format == "WEBP"
        resized = screen.convert("RGB").resize((64, 32), Image.Resampling.BICUBIC)
        assert opened.convert("RGB").tobytes() == resized.tobytes()
    assert image.to_screen(32, 16) == (100, 50)
    assert image.from_screen(100, 50) == (32, 16)


def test_a_screenshot_that_the_desktop_resized_keeps_its_bytes_and_maps_to_the_screen(noise_png: Noise) -> None:
    data = noise_png(64, 32, 0)
    image = prepare_screenshot(data, 64 * 32, screen_size=(200, 100))
    assert image.data == data
    assert image.to_screen(32, 16) == (100, 50)
    assert image.from_screen(100, 50) == (32, 16)


def test_a_point_at_the_far_corner_stays_on_the_screen(noise_png: Noise) -> None:
    image = prepare_screenshot(noise_png(200, 100, 0), 64 * 32)
    assert image.to_screen(64, 32) == (199, 99)
    assert image.to_screen(9999, 9999) == (199, 99)


def test_bytes_that_are_not_an_image_are_refused() -> None:
    with pytest.raises(ValueError, match="is not an image"):
        prepare_screenshot(b"not a png", 1024)


def test_a_torn_png_is_refused(noise_png: Noise) -> None:
    with pytest.raises(ValueError, match="is not an image"):
        prepare_screenshot(noise_png(64, 64, 0)[:500], 1 << 20)
