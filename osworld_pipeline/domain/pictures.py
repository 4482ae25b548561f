"""The only function that opens encoded images. Images from a guest, a dataset or another machine are untrusted: Pillow
would detect any of dozens of formats, including PostScript, regardless of the file name."""

import io

from PIL import Image, UnidentifiedImageError

from osworld_pipeline.domain.observation import MAX_PIXELS

FORMATS = ("PNG", "JPEG", "WEBP")
"""Formats of screenshots."""
NO_PICTURE = (UnidentifiedImageError, OSError, SyntaxError, ValueError, Image.DecompressionBombError)
"""Errors of Pillow for bytes in other formats, damaged bytes, or too many pixels."""


def open_picture(data: bytes) -> Image.Image:
    """Opens an image and reads its header; the pixels are decoded on demand.

    Raises:
        NO_PICTURE
    """
    picture = Image.open(io.BytesIO(data), formats=FORMATS)
    if picture.width * picture.height > MAX_PIXELS:
        raise Image.DecompressionBombError(
            f"the picture has {picture.width} x {picture.height} pixels; at most {MAX_PIXELS} are decoded"
        )
    return picture
