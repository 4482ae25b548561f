"""Foreign pictures are opened in the formats of screenshots, and in no other format that Pillow supports."""

import io
import re
from pathlib import Path

import pytest
from PIL import Image, UnidentifiedImageError

from osworld_pipeline.domain.pictures import FORMATS, open_picture

ROOT = Path(__file__).resolve().parents[3]
OPENED_ELSEWHERE = {"osworld_pipeline/domain/pictures.py", "env_server/providers/qemu/screen_view.py"}
"""The opener itself, and pictures that QEMU makes on the host."""


def encoded(image_format: str) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (4, 3), "red").save(buffer, image_format)
    return buffer.getvalue()


@pytest.mark.parametrize("image_format", FORMATS)
def test_pictures_in_the_formats_of_screenshots_are_opened(image_format: str) -> None:
    assert open_picture(encoded(image_format)).size == (4, 3)


@pytest.mark.parametrize("image_format", ["BMP", "EPS", "GIF", "ICO", "PCX", "PPM", "TGA", "TIFF"])
def test_pictures_in_other_formats_are_refused(image_format: str) -> None:
    data = encoded(image_format)
    with pytest.raises(UnidentifiedImageError):
        open_picture(data)


def test_no_module_opens_a_picture_in_another_way() -> None:
    packages = ("osworld_pipeline", "env_server", "assets", "resources", "jobs")
    sources = [path for package in packages for path in (ROOT / package).rglob("*.py")]
    found = {str(path.relative_to(ROOT)) for path in sources if re.search(r"\bImage\.open\(", path.read_text())}
    assert {name for name in found if not name.startswith("env_server/guest/")} <= OPENED_ELSEWHERE
