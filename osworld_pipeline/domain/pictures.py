"""The one way to open an encoded picture. What comes from a guest, a dataset or another machine is foreign: Pillow
would read it in any of dozens of formats, PostScript and camera films among them, whatever it calls itself."""

import io

from PIL import Image

FORMATS = ("PNG", "JPEG", "WEBP")
"""That screenshots come in."""


def open_picture(data: bytes) -> Image.Image:
    """Its header is read, its pixels when they are needed.

    Raises:
        UnidentifiedImageError, OSError, SyntaxError, ValueError, Image.DecompressionBombError: none of these formats,
        or damaged.
    """
    return Image.open(io.BytesIO(data), formats=FORMATS)
