"""The files of packs: any zip program reads a pack, a look-up finds exactly what is there, and bytes that are not a
pack or an index are one clear error."""

import hashlib
import os
import random
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from osworld_pipeline.errors import StoreError
from osworld_pipeline.store import pack_index, pack_merging, packs
from osworld_pipeline.store.image_sets import keys_of
from osworld_pipeline.store.pack_files import read_image, read_members
from osworld_pipeline.store.pack_index import PackIndex, image_keys
from osworld_pipeline.store.pack_merging import merge_indexes
from osworld_pipeline.store.packs import Packs, index_path, write_pack

IMAGES = [(hashlib.sha256(data).hexdigest(), data) for data in (str(number).encode() * 9 for number in range(40))]
ABSENT = [hashlib.sha256(str(number).encode()).hexdigest() for number in range(100, 140)]


def make_pack(root: Path, images: list[tuple[str, bytes]] = IMAGES) -> str:
    contents = ((f"{sha256}.png", data, 1_600_000_000.0) for sha256, data in images)
    return write_pack(root, contents, temp_folder=root.parent / "incoming")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("store") / "packs"
    make_pack(root)
    return root


def test_any_zip_program_reads_a_pack(whole: Path) -> None:
    (path,) = whole.glob("*.zip")
    with zipfile.ZipFile(path) as pack:
        assert pack.testzip() is None
        assert {name: pack.read(name) for name in pack.namelist()} == {f"{name}.png": data for name, data in IMAGES}
    if shutil.which("unzip"):
        name = f"{IMAGES[3][0]}.png"
        assert subprocess.run(["unzip", "-p", path, name], capture_output=True, check=True).stdout == IMAGES[3][1]


def test_packed_images_are_found_and_nothing_else(whole: Path) -> None:
    found = Packs(whole)
    assert [found.read(sha256) for sha256, _ in IMAGES] == [data for _, data in IMAGES]
    assert [found.read(sha256) for sha256 in (*ABSENT, "", "no digest", "z" * 64)] == [None] * 43
    (path,) = whole.glob("*.zip")
    for member in read_members(path):
        assert read_image(path, member.sha256, offset=member.offset, num_bytes=member.num_bytes)
        assert member.modified == 1_600_000_000
    assert found.member(IMAGES[5][0]) == f"{path.name}/{IMAGES[5][0]}.png"


def test_a_lost_index_is_made_again_from_its_pack(whole: Path, tmp_path: Path) -> None:
    root = tmp_path / "packs"
    shutil.copytree(whole, root)
    (name,) = Packs(root).here()
    before = index_path(root, name).read_bytes()
    index_path(root, name).unlink()
    assert Packs(root).named() == frozenset()
    packs.index_pack(root, name, temp_folder=tmp_path)
    assert index_path(root, name).read_bytes() == before


damage = st.one_of(
    st.tuples(st.just("cut"), st.integers(0, 10**6)),
    st.tuples(st.just("flip"), st.integers(0, 10**6)),
    st.tuples(st.just("foreign"), st.integers(0, 10**6)),
)


def damaged(data: bytes, how: str, number: int) -> bytes:
    if how == "cut":
        return data[: number % len(data)]
    if how == "flip":
        place = number % len(data)
        return data[:place] + bytes([data[place] ^ 1 << number % 8]) + data[place + 1 :]
    return random.Random(number).randbytes(number % (2 * len(data)))


def attempt(act: Callable[[], object]) -> None:
    """Calls `act`; the only error allowed has one line and says what to do."""
    problem = "remove it"
    try:
        act()
    except StoreError as error:
        problem = str(error)
    assert "\n" not in problem
    assert "remove it" in problem


@settings(max_examples=80, deadline=None)
@given(damage)
def test_a_damaged_pack_gives_no_other_bytes_and_one_clear_error(
    whole: Path, tmp_path_factory: pytest.TempPathFactory, damage: tuple[str, int]
) -> None:
    root = tmp_path_factory.mktemp("damaged") / "packs"
    shutil.copytree(whole, root)
    (path,) = root.glob("*.zip")
    path.write_bytes(damaged(path.read_bytes(), *damage))
    attempt(lambda: read_members(path))
    found = Packs(root)
    right = 0
    for sha256, data in IMAGES:

        def read(sha256: str = sha256, data: bytes = data) -> None:
            nonlocal right
            assert found.read(sha256) == data
            right += 1

        attempt(read)
    if damage[0] == "flip":
        assert right >= len(IMAGES) - 1, "one bit is of one image"


def test_an_error_of_the_file_system_is_not_reported_as_damage(tmp_path: Path) -> None:
    """The error for damage says to remove the file; a folder in its place cannot be read, as with EIO."""
    folder = tmp_path / "x.zip"
    folder.mkdir()
    for read in (lambda: read_members(folder), lambda: read_image(folder, IMAGES[0][0], offset=0, num_bytes=1)):
        with pytest.raises(StoreError, match=r"x\.zip cannot be read: Is a directory; fix that") as refused:
            read()
        assert "remove it" not in str(refused.value)


@settings(max_examples=80, deadline=None)
@given(damage)
def test_a_damaged_index_gives_no_other_bytes_and_one_clear_error(
    whole: Path, tmp_path_factory: pytest.TempPathFactory, damage: tuple[str, int]
) -> None:
    root = tmp_path_factory.mktemp("damaged") / "packs"
    shutil.copytree(whole, root)
    (path,) = (root / "index").glob("*.index")
    was = path.read_bytes()
    path.write_bytes(damaged(was, *damage))
    found = Packs(root)
    for sha256, data in IMAGES:
        attempt(lambda sha256=sha256, data=data: in_(found.read(sha256), (data, None)))
    if path.read_bytes() != was:
        with pytest.raises(StoreError, match="rebuilds it from the packs"):
            PackIndex(path).check()


def in_(one: object, several: tuple[object, ...]) -> None:
    assert one in several


@given(st.lists(st.lists(st.integers(0, 60), max_size=12, unique=True), min_size=1, max_size=20), st.randoms())
@settings(max_examples=12, deadline=None)
def test_merged_indexes_have_the_same_entries_as_before(
    tmp_path_factory: pytest.TempPathFactory, contents: list[list[int]], draw: random.Random
) -> None:
    root = tmp_path_factory.mktemp("merged") / "packs"
    images = [(hashlib.sha256(bytes([number])).hexdigest(), bytes([number])) for number in range(61)]
    held = {make_pack(root, [images[number] for number in numbers]): set(numbers) for numbers in contents if numbers}
    for name in [name for name in held if draw.random() < 0.3]:
        (root / name).unlink()
        del held[name]
    found = Packs(root)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pack_merging, "FAN_IN", 3)
        patch.setattr(pack_merging, "CHUNK", 16)
        patch.setattr(pack_index, "CHUNK", 7)
        merge_indexes(found, temp_folder=root.parent)
        for index in found.indexes():
            index.check()
    assert len(found.indexes()) < 3
    for number, (sha256, data) in enumerate(images):
        where = {entry.pack for entry in found.entries(sha256) if entry.pack in held}
        assert where == {name for name, numbers in held.items() if number in numbers}
        assert found.read(sha256) == (data if where else None)


def test_a_killed_merge_leaves_indexes_that_the_next_removes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "packs"
    for start in range(0, 40, 10):
        make_pack(root, IMAGES[start : start + 10])
    left = {path: path.read_bytes() for path in (root / "index").iterdir()}
    monkeypatch.setattr(pack_merging, "FAN_IN", 4)
    merge_indexes(Packs(root), temp_folder=tmp_path)
    (merged,) = (root / "index").iterdir()
    for path, data in left.items():
        path.write_bytes(data)
    assert [index.path for index in Packs(root).indexes()] == [merged]
    merge_indexes(Packs(root), temp_folder=tmp_path)
    assert list((root / "index").iterdir()) == [merged]


def test_a_reader_sees_a_pack_that_was_written_after_its_last_look(tmp_path: Path) -> None:
    found = Packs(tmp_path / "packs")
    assert found.read(IMAGES[0][0]) is None
    for sha256, data in IMAGES[:12]:
        make_pack(tmp_path / "packs", [(sha256, data)])
        assert found.read(sha256) == data
    old = 1_600_000_000
    os.utime(tmp_path / "packs" / "index", (old, old))
    assert found.read(IMAGES[0][0]) is not None
    known = found.indexes()
    assert found.indexes() is known, "a folder that has not changed is not listed again"
    make_pack(tmp_path / "packs", [IMAGES[20]])
    assert found.read(IMAGES[20][0]) == IMAGES[20][1]


def test_the_keys_of_index_records_are_those_of_the_image_names(whole: Path) -> None:
    (index,) = Packs(whole).indexes()
    assert np.array_equal(image_keys(index.records()), keys_of(sorted(sha256 for sha256, _ in IMAGES)))


def test_a_look_up_reads_few_indexes_even_if_there_are_many_packs(tmp_path: Path) -> None:
    root = tmp_path / "packs"
    found = Packs(root)
    for number in range(60):
        data = str(number).encode()
        make_pack(root, [(hashlib.sha256(data).hexdigest(), data)])
        merge_indexes(found, temp_folder=tmp_path)
    assert len(found.here()) == 60
    assert len(found.indexes()) <= 8
