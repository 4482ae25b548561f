"""Sets of images that take a few bytes per image."""

import random

import numpy as np
import pytest

from osworld_pipeline.domain.digest import digest_bytes
from osworld_pipeline.store import image_sets
from osworld_pipeline.store.image_sets import absent, gather

NAMES = [digest_bytes(str(number).encode()) for number in range(2_000)]


@pytest.mark.parametrize("odd", [[], ["no digest"], ["z" * 64, "A" * 64]])
def test_a_set_contains_the_gathered_images_and_nothing_else(odd: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_sets, "_MERGED", 300)
    known = [*NAMES[:1_000], *odd]
    random.Random(0).shuffle(known)
    found = gather(known[start : start + 70] for start in range(0, len(known), 50))
    assert found.nbytes == 8 * len(known)
    assert list(absent(known, found)) == []
    assert list(absent([*NAMES[990:1_010], *odd], found)) == list(range(10, 20))


def test_an_empty_set_contains_no_image() -> None:
    empty = gather([])
    assert empty.dtype == np.uint64
    assert list(absent(NAMES[:3], empty)) == [0, 1, 2]
    assert list(absent([], empty)) == []
