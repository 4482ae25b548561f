"""Images are proven whole by their structure."""

import base64
import io
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from raw_samples import image_bytes

from osworld_pipeline.datasets.images import decode_image, prove_image
from osworld_pipeline.errors import DatasetError

FORMATS = {"PNG": "png", "JPEG": "jpeg", "WEBP": "webp"}


@pytest.mark.parametrize(("fmt", "suffix"), FORMATS.items())
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_an_image_of_each_format_is_recognised(fmt: str, suffix: str, mode: str) -> None:
    sink = io.BytesIO()
    Image.new(mode, (33, 21), 7).save(sink, fmt)
    assert prove_image(sink.getvalue()) == suffix


def test_a_lossless_webp_and_a_progressive_jpeg_are_recognised() -> None:
    for fmt, options in (("WEBP", {"lossless": True}), ("JPEG", {"progressive": True})):
        sink = io.BytesIO()
        Image.new("RGB", (33, 21)).save(sink, fmt, **options)
        assert prove_image(sink.getvalue()) == FORMATS[fmt]


@given(st.data())
@settings(max_examples=100)
def test_a_png_with_any_byte_changed_is_damaged(data: st.DataObject) -> None:
    image = bytearray(image_bytes())
    image[data.draw(st.integers(0, len(image) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(DatasetError):
        prove_image(bytes(image))


@pytest.mark.parametrize("fmt", FORMATS)
@given(st.floats(0, 0.99))
@settings(max_examples=30)
def test_a_cut_image_is_damaged(fmt: str, share: float) -> None:
    image = image_bytes(fmt=fmt)
    with pytest.raises(DatasetError):
        prove_image(image[: int(len(image) * share)])


@given(st.binary(max_size=60), st.sampled_from([b"", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"RIFF\0\0\0\0WEBPVP8X"]))
def test_no_bytes_crash_the_proof(data: bytes, start: bytes) -> None:
    with pytest.raises(DatasetError):
        prove_image(start + data)


def test_a_huge_canvas_is_refused_without_being_decoded() -> None:
    import zlib

    image = bytearray(image_bytes())
    image[16:24] = (60_000).to_bytes(4) * 2
    image[29:33] = zlib.crc32(image[12:29]).to_bytes(4)
    with pytest.raises(DatasetError, match="60000x60000 pixels"):
        prove_image(bytes(image))


def without_png_pixels() -> bytes:
    image = image_bytes()
    start = image.index(b"IDAT") - 4
    length = int.from_bytes(image[start : start + 4])
    return image[:start] + image[start + 12 + length :]


def without_jpeg_pixels() -> bytes:
    image = image_bytes(fmt="JPEG")
    scan = image.index(b"\xff\xda") + 2
    return image[: scan + int.from_bytes(image[scan : scan + 2])] + b"\xff\xd9"


def without_webp_pixels() -> bytes:
    canvas = b"VP8X" + (10).to_bytes(4, "little") + bytes(4) + (31).to_bytes(3, "little") * 2
    return b"RIFF" + (4 + len(canvas)).to_bytes(4, "little") + b"WEBP" + canvas


@pytest.mark.parametrize("make", [without_png_pixels, without_jpeg_pixels, without_webp_pixels])
def test_an_image_without_pixel_data_is_damaged(make: Callable[[], bytes]) -> None:
    with pytest.raises(DatasetError, match="without pixel data"):
        prove_image(make())


def test_a_data_uri_is_decoded_and_its_format_is_returned() -> None:
    encoded = base64.b64encode(image_bytes(fmt="JPEG")).decode()
    for text in (
        encoded,
        f"data:image/jpeg;base64,{encoded}",
        f"DATA:IMAGE/JPEG;BASE64,{encoded}",
        encoded[:40] + "\n" + encoded[40:],
    ):
        assert decode_image(text) == (image_bytes(fmt="JPEG"), "jpeg")
