"""Known defects of policy servers in positions and images. Each defect is imitated by a change to a correct forward
pass.

Shapes: T tokens, I images.
"""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from PIL import Image

from osworld_pipeline.domain.pictures import open_picture

Images = tuple[bytes, ...]
SERVER = "use another version of the policy server, or another of its attention and multimodal backends"
IMAGES = "check that every image of a request reaches the model in order, in every turn"
PIXELS = "check that the server has this checkpoint's image processor and does not change images before it"


@dataclass(frozen=True, kw_only=True)
class Defect:
    name: str
    """Completes the sentence "the server ..."."""
    advice: str
    change_images: Callable[[Images], Images] = lambda images: images
    change_positions: Callable[[np.ndarray, int], np.ndarray] = lambda positions_3T, num_prompt: positions_3T
    """Receives the tokens' positions and the number of prompt tokens."""
    unseen: Literal["none", "later", "all"] = "none"
    """Images that the model does not see: all but the first, or all."""
    unseen_as: Literal["placeholders", "text", "zeros"] = "placeholders"
    """Their replacement: the placeholder's own embedding, with the image's positions or with those of text; or
    zeros."""


def _first_everywhere(images: Images) -> Images:
    return images[:1] * len(images)


def _last_first(images: Images) -> Images:
    return images[::-1]


def _without_rows(positions_3T: np.ndarray, num_prompt: int) -> np.ndarray:
    return np.repeat(positions_3T[:1], 3, axis=0)


def _exchanged_rows(positions_3T: np.ndarray, num_prompt: int) -> np.ndarray:
    return positions_3T[[0, 2, 1]]


def _one_by_one(positions_3T: np.ndarray, num_prompt: int) -> np.ndarray:
    return np.tile(np.arange(positions_3T.shape[1]), (3, 1))


def _sampled_one_by_one(positions_3T: np.ndarray, num_prompt: int) -> np.ndarray:
    changed = positions_3T.copy()
    changed[:, num_prompt:] = np.arange(num_prompt, positions_3T.shape[1])
    return changed


def _resized(size_of: Callable[[int, int], tuple[int, int]], *, there_and_back: bool) -> Callable[[Images], Images]:
    def change(images: Images) -> Images:
        return tuple(_encode(_resize(_decode(image), size_of, there_and_back)) for image in images)

    return change


def _resize(image: Image.Image, size_of: Callable[[int, int], tuple[int, int]], there_and_back: bool) -> Image.Image:
    resized = image.resize(size_of(*image.size), Image.Resampling.BICUBIC)
    return resized.resize(image.size, Image.Resampling.BICUBIC) if there_and_back else resized


def _reversed_channels(images: Images) -> Images:
    return tuple(_encode(Image.merge("RGB", _decode(image).split()[::-1])) for image in images)


def _decode(image: bytes) -> Image.Image:
    with open_picture(image) as opened:
        return opened.convert("RGB")


def _encode(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", compress_level=1)
    return buffer.getvalue()


LATER_UNSEEN = "drops every image after the first turn"
ALL_UNSEEN = "shows the model no image at all"

DEFECTS: Sequence[Defect] = (
    Defect(name="drops the height and width rows of M-RoPE", advice=SERVER, change_positions=_without_rows),
    Defect(name="exchanges the height and width rows of M-RoPE", advice=SERVER, change_positions=_exchanged_rows),
    Defect(name="counts image tokens one by one, without M-RoPE", advice=SERVER, change_positions=_one_by_one),
    Defect(
        name="gives sampled tokens positions without M-RoPE's offset",
        advice=SERVER,
        change_positions=_sampled_one_by_one,
    ),
    Defect(name=LATER_UNSEEN, advice=IMAGES, unseen="later", unseen_as="placeholders"),
    Defect(name=LATER_UNSEEN, advice=IMAGES, unseen="later", unseen_as="text"),
    Defect(name=LATER_UNSEEN, advice=IMAGES, unseen="later", unseen_as="zeros"),
    Defect(name=ALL_UNSEEN, advice=IMAGES, unseen="all", unseen_as="placeholders"),
    Defect(name=ALL_UNSEEN, advice=IMAGES, unseen="all", unseen_as="text"),
    Defect(name=ALL_UNSEEN, advice=IMAGES, unseen="all", unseen_as="zeros"),
    Defect(name="shows the first image in place of every later one", advice=IMAGES, change_images=_first_everywhere),
    Defect(name="exchanges the images of a request", advice=IMAGES, change_images=_last_first),
    Defect(
        name="rescales images before the model sees them",
        advice=PIXELS,
        change_images=_resized(lambda width, height: (width // 2, height // 2), there_and_back=True),
    ),
    Defect(
        name="exchanges width and height of images",
        advice=PIXELS,
        change_images=_resized(lambda width, height: (height, width), there_and_back=False),
    ),
    Defect(name="exchanges the red and blue channels of images", advice=PIXELS, change_images=_reversed_channels),
)
