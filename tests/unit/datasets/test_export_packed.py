"""An export of a state with packed images equals the export from before the packing, byte for byte."""

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
def test_packing_images_does_not_change_an_export(tmp_path: Path, export: Callable[[StateDir, Path], object]) -> None:
    state = make_state(tmp_path / "var")
    export(state, tmp_path / "before")
    pack_cold_images(BlobStore(state.blobs), cold_s=-10, min_bytes=0)
    assert list(state.blobs.glob("??/*")) == []
    export(state, tmp_path / "after")
    assert contents(tmp_path / "after") == contents(tmp_path / "before")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
