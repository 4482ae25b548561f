"""Images of an origin: checked like those of the union build, and kept byte for byte."""

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from osworld_pipeline.datasets.images import MAX_IMAGE_BYTES
from osworld_pipeline.datasets.images import prove_image as prove_structure
from osworld_pipeline.datasets.regular_files import read_regular_file
from osworld_pipeline.domain.digest import digest_bytes
from osworld_pipeline.domain.pictures import NO_PICTURE, open_picture
from osworld_pipeline.errors import DatasetError


@dataclass(frozen=True, kw_only=True)
class ProvenImage:
    data: bytes | None
    """None for an image in a file, which is read again when needed."""
    suffix: str
    width: int
    height: int
    sha256: str
    num_bytes: int
    path: Path | None = None

    @property
    def name(self) -> str:
        """Its path in an import's folder."""
        return f"images/{self.sha256}.{self.suffix}"

    def read(self) -> bytes:
        if self.data is not None:
            return self.data
        assert self.path is not None, self
        return read_regular_file(self.path, max_bytes=MAX_IMAGE_BYTES)


def prove_image(data: bytes, *, path: Path | None = None) -> ProvenImage:
    """Raises DatasetError: not a PNG, JPEG or WebP, too large, or of damaged structure."""
    suffix = prove_structure(data)
    try:
        with open_picture(data) as image:
            width, height = image.size
    except NO_PICTURE as error:
        raise DatasetError(f"a damaged image: {error}") from error
    return ProvenImage(
        data=data if path is None else None,
        suffix=suffix,
        width=width,
        height=height,
        sha256=digest_bytes(data),
        num_bytes=len(data),
        path=path,
    )


def read_image(folder: Path, name: object) -> ProvenImage:
    """An image that a record names, in or below `folder`.

    Raises:
        DatasetError: no name, a path outside the folder, no such file, or not an image.
    """
    if not isinstance(name, str) or not name:
        raise DatasetError("no image is named")
    relative = PurePosixPath(name.replace("\\", "/"))
    if relative.is_absolute() or ".." in relative.parts:
        raise DatasetError(f"the image '{name[:80]}' is not inside its folder")
    path = folder / relative
    try:
        # A link may point anywhere (a hub's cache consists of links); its target must be an image.
        path = path.resolve(strict=True)
        data = read_regular_file(path, max_bytes=MAX_IMAGE_BYTES)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DatasetError(f"the image '{name[:80]}' cannot be read: {reason}") from error
    try:
        return prove_image(data, path=path)
    except DatasetError as error:
        raise DatasetError(f"the image '{name[:80]}': {error}") from error
