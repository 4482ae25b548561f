"""The screens of the parity probe are the same everywhere and fit the recipe that they are drawn for."""

import io
import subprocess
import sys

import pytest
from PIL import Image

from osworld_pipeline.agent.parity_cases import parity_cases
from osworld_pipeline.agent.parity_screens import draw_screen
from osworld_pipeline.domain.digest import digest_bytes
from osworld_pipeline.recipes import load_recipe

PIXELS = {
    (512, 320, 1): "94c43ab3fb9c7562984b2ee464dea008fdddd5b801a1b652cfb35e3a0963fcf0",
    (256, 96, 4): "d6b0e98717c1b71c52b1717023670f733ec0cc49f2bf7b7c6bb2e9e068717bc9",
    (96, 256, 2): "7ec7dc1d9aca5d9cae6c4a433d3ff39b02652d8fa24bfd0e90e025687506dd02",
    (32, 32, 0): "8e16bb7274161cb28c7b45934412e407f44b04f044d63eb952f0eee015a6677d",
}
"""SHA-256 of the pixels by width, height and seed."""


def pixels_of(screen: bytes) -> bytes:
    with Image.open(io.BytesIO(screen)) as image:
        return image.tobytes()


@pytest.mark.parametrize(("width", "height", "seed"), PIXELS)
def test_a_screen_has_the_same_pixels_everywhere(width: int, height: int, seed: int) -> None:
    screen = draw_screen(width, height, seed=seed)
    assert digest_bytes(pixels_of(screen)) == PIXELS[width, height, seed]


def test_a_screen_has_the_same_bytes_in_every_process() -> None:
    script = (
        "import sys; from osworld_pipeline.agent.parity_screens import draw_screen; "
        "sys.stdout.buffer.write(draw_screen(256, 96, seed=4))"
    )
    drawn = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, timeout=60).stdout
    assert drawn == draw_screen(256, 96, seed=4)


@pytest.mark.parametrize("name", ["smoke", "demo", "qwen3vl_4b"])
def test_screens_fit_the_recipe_and_include_wide_and_tall_ones(name: str) -> None:
    recipe = load_recipe(name)
    cases = [case for case in parity_cases(recipe.agent, recipe.desktop) if not case.is_text]
    sizes = [Image.open(io.BytesIO(screen)).size for case in cases for screen in case.screens]
    assert all(width * height <= recipe.agent.max_pixels for width, height in sizes)
    assert all(width % 32 == height % 32 == 0 for width, height in sizes)
    assert any(width > height for width, height in sizes)
    assert any(width < height for width, height in sizes)


def test_no_two_screens_of_one_size_are_alike() -> None:
    recipe = load_recipe("smoke")
    for case in parity_cases(recipe.agent, recipe.desktop):
        assert len(set(case.screens)) == len(case.screens)
