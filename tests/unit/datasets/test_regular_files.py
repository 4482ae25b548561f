"""A foreign folder may hold a FIFO or a device under a file's name: reading does not wait and gives a clear error."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from osworld_pipeline.datasets.images import load_image
from osworld_pipeline.datasets.importers.images import read_image
from osworld_pipeline.datasets.regular_files import read_regular_file
from osworld_pipeline.errors import DatasetError

pytestmark = pytest.mark.timeout(20)


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def link_to(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


FOREIGN = [make_fifo, link_to("/dev/zero"), link_to("/dev/tty"), Path.mkdir]


@pytest.mark.parametrize("make", FOREIGN)
def test_a_path_to_a_non_regular_file_is_refused_without_waiting(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path / "a.png")
    with pytest.raises(OSError, match=r".+"):
        read_regular_file(tmp_path / "a.png")
    with pytest.raises(DatasetError, match=r"the image 'a.png' cannot be read"):
        read_image(tmp_path, "a.png")
    with pytest.raises(DatasetError, match=r"cannot read 'a.png'|points outside the source's folder"):
        load_image("a.png", tmp_path)


def test_a_file_of_the_kernel_is_not_accepted_as_an_image(tmp_path: Path) -> None:
    (tmp_path / "a.png").symlink_to("/proc/kmsg")
    with pytest.raises(DatasetError, match=r"the image 'a.png'"):
        read_image(tmp_path, "a.png")


def test_a_file_is_read_up_to_its_limit_and_through_links(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    (tmp_path / "b").symlink_to("a")
    assert read_regular_file(tmp_path / "b", max_bytes=5) == b"12345"
    with pytest.raises(OSError, match="a is larger than"):
        read_regular_file(tmp_path / "a", max_bytes=4)
    with pytest.raises(FileNotFoundError):
        read_regular_file(tmp_path / "c")
