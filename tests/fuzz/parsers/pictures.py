"""Pictures of guests, datasets and virtual machines."""

import base64
import gc
import io

from PIL import Image

from env_server.driving.images import size_of, to_format
from env_server.providers.qemu.screen_view import changed_share, is_blank, open_screen
from fuzz.parser import Parser, scratch_folder, text_of, wait_for
from osworld_pipeline.agent.images import prepare_screenshot
from osworld_pipeline.datasets.images import load_image
from osworld_pipeline.datasets.importers.images import prove_image
from osworld_pipeline.errors import DatasetError, ReplicaError


def picture(kind: str, size: tuple[int, int] = (16, 8)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, (200, 10, 20)).save(buffer, kind)
    return buffer.getvalue()


PICTURES = tuple(map(picture, ("PNG", "JPEG", "WEBP")))


def _of_guest(data: bytes) -> None:
    size_of(data)
    try:
        wait_for(to_format(data, "jpeg"))
    finally:
        gc.collect()  # a refusal's traceback keeps a reference to the decoded data


def _of_dataset(data: bytes) -> None:
    assert prove_image(data).width > 0


def _named(data: bytes) -> None:
    with scratch_folder() as folder:
        load_image(text_of(data), folder)


def _of_machine(data: bytes) -> None:
    screen = open_screen(data)
    is_blank(screen)
    changed_share(screen, screen)


PARSERS = [
    Parser(name="guest_picture", read=_of_guest, refusals=(ReplicaError,), seeds=PICTURES, has_numbers=False),
    Parser(name="dataset_picture", read=_of_dataset, refusals=(DatasetError,), seeds=PICTURES, has_numbers=False),
    Parser(
        name="model_picture",
        read=lambda data: prepare_screenshot(data, 64 * 64),
        refusals=(ValueError,),
        seeds=PICTURES,
        has_numbers=False,
    ),
    Parser(
        name="named_picture",
        read=_named,
        refusals=(DatasetError,),
        seeds=tuple(start + base64.b64encode(one) for one in PICTURES for start in (b"", b"data:image/png;base64,")),
        has_numbers=False,
    ),
    Parser(
        name="machine_screen",
        read=_of_machine,
        refusals=(ReplicaError,),
        seeds=(picture("PPM"), b"P6\n2 1\n255\n\0\0\0\1\1\1"),
    ),
]
