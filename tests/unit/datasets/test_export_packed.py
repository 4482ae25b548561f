"""An export of a state whose images are packed is, byte for byte, the export of before."""

from collections.abc import Callable
from pathlib import Path

import pytest
from export_samples import PROMPT, make_state

from osworld_pipeline.datasets.exporters.huggingface import export_huggingface
from osworld_pipeline.datasets.exporters.osworld_results import export_osworld_results
from osworld_pipeline.datasets.exporters.slime import export_slime
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.store import BlobStore
from osworld_pipeline.store.packing import pack_cold_images


def slime(state: StateDir, folder: Path) -> None:
    export_slime(state, folder, system_prompt=PROMPT)


@pytest.mark.parametrize("export", [slime, export_osworld_results, export_huggingface])
def test_an_export_of_packed_images_is_that_of_before(
    tmp_path: Path, export: Callable[[StateDir, Path], object]
) -> None:
    state = make_state(tmp_path / "var")
    export(state, tmp_path / "before")
    pack_cold_images(BlobStore(state.blobs), cold_s=-10, min_bytes=0)
    assert list(state.blobs.glob("??/*")) == []
    export(state, tmp_path / "after")
    assert contents(tmp_path / "after") == contents(tmp_path / "before")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
