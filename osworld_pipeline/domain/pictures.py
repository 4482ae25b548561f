"""The one way to open an encoded picture. What comes from a guest, a dataset or another machine is foreign: Pillow
would read it in any of dozens of formats, PostScript and camera films among them, whatever it calls itself."""

import io

from PIL import Image, UnidentifiedImageError

from osworld_pipeline.domain.observation import MAX_PIXELS

FORMATS = ("PNG", "JPEG", "WEBP")
"""That screenshots come in."""
NO_PICTURE = (UnidentifiedImageError, OSError, SyntaxError, ValueError, Image.DecompressionBombError)
"""What Pillow raises for bytes that are none of these formats, damaged, or more pixels than it decodes."""


def open_picture(data: bytes) -> Image.Image:
    """Its header is read, its pixels when they are needed.

    Raises:
        NO_PICTURE
    """
    picture = Image.open(io.BytesIO(data), formats=FORMATS)
    if picture.width * picture.height > MAX_PIXELS:
        raise Image.DecompressionBombError(
            f"{picture.width} x {picture.height} pixels; at most {MAX_PIXELS} are decoded"
        )
    return picture
