"""Cold images in packs: found by every reader, before, during and after; collected when nothing names them; and
nothing is lost or left behind by a kill."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import pytest

from osworld_pipeline.atomic_io import locked
from osworld_pipeline.domain.digest import digest_bytes
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import StoreError
from osworld_pipeline.runs.upkeep.upkeep import collect_garbage, compact_store, is_compaction_due, missing_blobs
from osworld_pipeline.store import BlobStore, pack_garbage, packing
from osworld_pipeline.store.pack_files import Member, read_members
from osworld_pipeline.store.packing import PackingSummary, pack_cold_images, pack_some
from osworld_pipeline.store.touches import TouchJournal, TouchReader
from osworld_pipeline.tables.owned import write_table

DAY_S = 86_400.0


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    return StateDir(tmp_path / "var")


@pytest.fixture
def blobs(state: StateDir) -> BlobStore:
    return BlobStore(state.blobs)


def data_of(number: int) -> bytes:
    return random.Random(number).randbytes(50 + number)


def store(blobs: BlobStore, numbers: range, *, age_days: float = 0.0) -> list[str]:
    names = blobs.write_many([(data_of(number), "png") for number in numbers])
    if age_days:
        for sha256 in names:
            age(blobs, sha256, age_days)
    return names


def age(blobs: BlobStore, sha256: str, days: float) -> None:
    path = blobs.find_file(sha256)
    assert path is not None
    then = time.time() - days * DAY_S
    os.utime(path, (then, then))


def pack(blobs: BlobStore, **changes) -> PackingSummary:
    return pack_cold_images(blobs, **{"min_bytes": 0, **changes})


def loose(blobs: BlobStore) -> set[str]:
    return {sha256 for sha256, _, _ in blobs.list()}


def name_all(state: StateDir, names: list[str]) -> None:
    """Names the images in rows of one table, in place of all tables."""
    write_table(state, "replay_buffer", [{"row_id": "r", "images": names}])


def test_cold_images_are_packed_and_hot_ones_stay_files(blobs: BlobStore) -> None:
    cold, hot = store(blobs, range(20), age_days=4), store(blobs, range(20, 25), age_days=2)
    assert pack(blobs, pack_bytes=500) == PackingSummary(num_images=20, num_packs=3, num_removed=20)
    assert loose(blobs) == set(hot)
    assert [blobs.read(sha256) for sha256 in (*cold, *hot)] == [data_of(number) for number in range(25)]
    assert [blobs.size(sha256) for sha256 in (*cold, *hot)] == [50 + number for number in range(25)]
    assert pack(blobs) == PackingSummary()
    with pytest.raises(StoreError, match="is not in"):
        blobs.read("f" * 64)


def test_the_oldest_images_are_packed_together(blobs: BlobStore) -> None:
    for start, days in ((0, 5), (10, 9), (20, 7)):
        store(blobs, range(start, start + 10), age_days=days)
    pack(blobs, pack_bytes=10**6)
    (found,) = blobs.packs.here()
    order = [member.name for member in read_members(blobs.packs.path(found))]
    of = {f"{digest_bytes(data_of(number))}.png": number // 10 for number in range(30)}
    assert [of[name] for name in order] == [1] * 10 + [2] * 10 + [0] * 10


def test_too_few_cold_images_are_not_packed_yet_and_a_budget_bounds_the_work(blobs: BlobStore) -> None:
    store(blobs, range(30), age_days=4)
    assert pack(blobs, min_bytes=10_000) == PackingSummary()
    done = pack(blobs, pack_bytes=300, budget_bytes=600)
    assert done.num_packs <= 2
    assert 0 < done.num_images < 15
    assert is_compaction_due(StateDir(blobs.root.parent)), "some are left"
    assert pack(blobs, pack_bytes=300).num_images == 30 - done.num_images
    assert not is_compaction_due(StateDir(blobs.root.parent))


def test_an_image_touched_while_it_is_packed_stays_a_file(blobs: BlobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    names = store(blobs, range(5), age_days=4)
    remove = blobs.remove_unused

    def touch_and_remove(paths, *, before: float) -> tuple[int, int]:
        if paths:
            BlobStore(blobs.root).write(data_of(2), suffix="png")
        return remove(paths, before=before)

    monkeypatch.setattr(blobs, "remove_unused", touch_and_remove)
    assert pack(blobs).num_removed == 4
    assert loose(blobs) == {names[2]}
    assert [blobs.read(sha256) for sha256 in names] == [data_of(number) for number in range(5)]


def test_a_damaged_file_is_never_packed(blobs: BlobStore, caplog: pytest.LogCaptureFixture) -> None:
    names = store(blobs, range(3), age_days=4)
    path = blobs.find_file(names[1])
    assert path is not None
    path.write_bytes(b"other")
    age(blobs, names[1], 4)
    assert pack(blobs).num_damaged == 1
    assert loose(blobs) == {names[1]}
    assert "does not match its name" in caplog.text


def test_a_packed_image_stored_again_gets_no_file_and_is_not_collected(state: StateDir, blobs: BlobStore) -> None:
    names = store(blobs, range(10), age_days=4)
    pack(blobs)
    again = BlobStore(state.blobs)
    assert again.write(data_of(3), suffix="png") == names[3]
    assert loose(blobs) == set()
    dry = collect_garbage(state, is_dry_run=True)
    assert blobs.packs.find(names[0]) is not None
    assert collect_garbage(state) == dry
    assert dry.num_images == 9
    assert blobs.read(names[3]) == data_of(3)
    for sha256 in (*names[:3], *names[4:]):
        with pytest.raises(StoreError, match="is not in"):
            blobs.read(sha256)


def test_an_image_touched_during_the_collection_of_its_pack_is_kept(
    state: StateDir, blobs: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = store(blobs, range(6), age_days=4)
    pack(blobs)
    name_all(state, names[:2])
    write = pack_garbage.write_pack

    def write_and_touch(*arguments, **options) -> str:
        BlobStore(state.blobs).write(data_of(5), suffix="png")
        return write(*arguments, **options)

    monkeypatch.setattr(pack_garbage, "write_pack", write_and_touch)
    collect_garbage(state)
    assert [blobs.read(names[number]) for number in (0, 1, 5)] == [data_of(number) for number in (0, 1, 5)]
    assert blobs.packs.find(names[4]) is None


def test_a_pack_is_written_again_when_much_of_it_is_dead(state: StateDir, blobs: BlobStore) -> None:
    names = store(blobs, range(40), age_days=4)
    pack(blobs, pack_bytes=10**6)
    (first,) = blobs.packs.here()
    name_all(state, names[:36])
    assert collect_garbage(state).num_images == 0
    assert blobs.packs.here() == {first}, "a tenth is dead: to write it again would cost more than it gains"
    name_all(state, names[:10])
    assert collect_garbage(state).num_images == 30
    assert first not in blobs.packs.here()
    assert [blobs.read(sha256) for sha256 in names[:10]] == [data_of(number) for number in range(10)]
    assert missing_blobs(state) == {}
    assert list(missing_blobs_after_loss(state, blobs)) == sorted(names[:10])


def missing_blobs_after_loss(state: StateDir, blobs: BlobStore) -> Mapping[str, Path]:
    for name in blobs.packs.here():
        blobs.packs.path(name).unlink()
    return missing_blobs(state)


def test_a_pack_with_a_damaged_image_that_is_needed_stays_and_is_named(state: StateDir, blobs: BlobStore) -> None:
    names = store(blobs, range(10), age_days=4)
    name_all(state, names[:2])
    pack(blobs)
    (name,) = blobs.packs.here()
    path = blobs.packs.path(name)
    path.write_bytes(path.read_bytes().replace(data_of(1), bytes(len(data_of(1)))))
    with pytest.raises(StoreError, match=rf"{name} is damaged \(image {names[1]} has other bytes\)"):
        collect_garbage(state)
    assert blobs.packs.here() == {name}
    assert blobs.read(names[0]) == data_of(0)


def test_old_images_in_packs_are_kept_under_a_longer_grace_period(state: StateDir, blobs: BlobStore) -> None:
    store(blobs, range(4), age_days=4)
    pack(blobs)
    assert collect_garbage(state, grace_s=5 * DAY_S).num_images == 0
    assert collect_garbage(state, grace_s=3 * DAY_S).num_images == 4
    assert blobs.packs.here() == frozenset()


def test_a_damaged_index_stops_upkeep_with_one_sentence_and_no_writer(
    state: StateDir, blobs: BlobStore, caplog: pytest.LogCaptureFixture
) -> None:
    names = store(blobs, range(4), age_days=4)
    pack(blobs)
    (path,) = blobs.packs.index_root.iterdir()
    damaged = path.with_name("damaged.index")
    damaged.write_bytes(path.read_bytes()[:-1])
    path.unlink()
    fresh = BlobStore(state.blobs)
    for act in (collect_garbage, compact_store, missing_blobs, lambda _: fresh.read(names[0])):
        with pytest.raises(StoreError, match=r"index is damaged .* rebuilds it from the packs next to it") as refused:
            act(state)
        assert f"osworld-pipeline compact --state {state.root}`" in str(refused.value)
    assert fresh.write(data_of(0), suffix="png") == names[0]
    assert fresh.read(names[0]) == data_of(0)
    damaged.unlink()
    compact_store(state, cold_days=0)
    assert [fresh.read(sha256) for sha256 in names] == [data_of(number) for number in range(4)]


def test_automatic_packing_is_bounded_and_never_fails_its_caller(
    state: StateDir, blobs: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "SCAN_IMAGES", 10)
    assert pack_some(state) is None, "there is no image"
    store(blobs, range(25), age_days=4)
    with locked(state.trajectories / "upkeep.lock", timeout_s=1, error=StoreError, what="it"):
        assert pack_some(state) is None
    found = [pack_some(state) for _ in range(4)]
    # A pass of ten is full and is packed even if it is small; the last five are less than a pack.
    assert [done and done.num_images for done in found] == [10, 10, 0, None]


def test_each_complete_line_of_a_journal_of_touches_is_read_once(tmp_path: Path) -> None:
    journal, reader = TouchJournal(tmp_path), TouchReader(tmp_path, since=time.time() - 60)
    journal.add("ab" * 32)
    assert [name for names in reader.news() for name in names] == ["ab" * 32]
    journal.add("cd" * 32)
    (path,) = (tmp_path / "touched").iterdir()
    with path.open("ab") as file:
        file.write(b"torn")
    assert [name for names in reader.news() for name in names] == ["cd" * 32]
    assert [name for names in reader.news() for name in names] == []


def test_readers_and_writers_continue_while_images_are_packed_and_collected(state: StateDir, blobs: BlobStore) -> None:
    """Every image that a row names, and every one that was stored just now, is found at every moment."""
    names = store(blobs, range(20), age_days=4)
    name_all(state, names)
    ended, lost = threading.Event(), list[int]()

    def work(parity: int) -> None:
        # Each worker has its own images: `age` would make an image old that another worker has just stored.
        draw, mine, first = random.Random(parity), BlobStore(state.blobs), 10
        while not ended.is_set():
            old, new = draw.randrange(20), 2 * draw.randrange(first, first + 20) + parity
            first += 1
            sha256 = mine.write(data_of(new), suffix="png")
            lost.extend(
                number for number, name in ((old, names[old]), (new, sha256)) if mine.read(name) != data_of(number)
            )
            with suppress(AssertionError, FileNotFoundError):  # the image is already packed
                age(mine, sha256, 4)

    workers = [threading.Thread(target=work, args=(parity,)) for parity in (0, 1)]
    for worker in workers:
        worker.start()
    num_collected = 0
    try:
        end = time.monotonic() + 2
        while time.monotonic() < end:
            pack(blobs, pack_bytes=1_500)
            num_collected += collect_garbage(state, grace_s=DAY_S).num_images
    finally:
        ended.set()
        for worker in workers:
            worker.join()
    assert lost == []
    assert num_collected > 20
    assert [blobs.read(name) for name in names] == [data_of(number) for number in range(20)]


PACK_FOR_EVER = """
import os, sys, time
from pathlib import Path
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.runs.upkeep.upkeep import collect_garbage
from osworld_pipeline.store import BlobStore, compaction
from osworld_pipeline.store.packing import pack_cold_images
state = StateDir(Path(sys.argv[1]))
blobs = BlobStore(state.blobs)
print("ready", flush=True)
while True:
    for _, path, _ in blobs.list():
        os.utime(path, (1_600_000_000, 1_600_000_000))
    with compaction.exclusive(state.trajectories):
        pack_cold_images(blobs, pack_bytes=4_000, min_bytes=0)
    collect_garbage(state, grace_s=60)
"""


@pytest.mark.slow
def test_packing_killed_at_any_moment_loses_nothing_and_leaves_nothing(state: StateDir, blobs: BlobStore) -> None:
    draw = random.Random(7)
    kept: dict[str, bytes] = {}
    for round_ in range(4):
        numbers = range(round_ * 100, round_ * 100 + 100)
        names = store(blobs, numbers)
        used = names[::2]
        kept |= {sha256: data_of(number) for sha256, number in zip(used, numbers[::2], strict=True)}
        name_all(state, list(kept))
        command = [sys.executable, "-c", PACK_FOR_EVER, str(state.root)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            time.sleep(draw.uniform(0, 0.25))
            os.kill(child.pid, signal.SIGKILL)
        assert {sha256: blobs.read(sha256) for sha256 in kept} == kept
        assert missing_blobs(state) == {}
    for sha256 in loose(blobs):
        age(blobs, sha256, 4)
    for _ in range(2):
        pack(blobs)
        collect_garbage(state, grace_s=60)
    assert {sha256: blobs.read(sha256) for sha256 in kept} == kept
    assert loose(blobs) == set()
    members = [member.sha256 for name in blobs.packs.here() for member in members_of(blobs, name)]
    assert len(members) == len(set(members)), "no image is in two packs"
    assert len(members) <= len(kept) * 4 / 3, "less than a quarter is dead"
    assert list((blobs.root / "incoming").iterdir()) == []
    named = {name for index in blobs.packs.indexes() for name in index.packs}
    assert blobs.packs.here() <= named
    assert len(list(blobs.packs.index_root.iterdir())) == len(blobs.packs.indexes())


def members_of(blobs: BlobStore, name: str) -> list[Member]:
    return read_members(blobs.packs.path(name))
