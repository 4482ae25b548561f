"""Makes the state of a version that later versions are tested with, and its surface: `python tests/states/make.py
VERSION` in a checkout of that version, where local desktops run. It takes about four minutes.

The recipe `smoke` with the smallest model runs all stages. Its parts are compacted and its images packed; then one more
evaluation adds small parts and single images. What other programs own (Dagster, MLflow, desktops) and what no test
reads (optimisers, all weights but the base model's) is left out.
"""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STATES = Path(__file__).resolve().parent
SETTINGS = (
    "model.hidden_size=32", "model.num_layers=1", "model.vision_hidden_size=4", "model.vision_depth=1",
    "model.vocab_size=320", "desktop.screen_width=320", "desktop.screen_height=240",
)  # fmt: skip
RECIPE = ("--recipe", "smoke", *(word for one in SETTINGS for word in ("--set", one)))
KEPT = ("trajectories", "tables", "blobs", "checkpoints", "osworld.duckdb")
PACK = """
import sys
from pathlib import Path
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.store import BlobStore
from osworld_pipeline.store.packing import pack_cold_images
assert pack_cold_images(BlobStore(StateDir(Path(sys.argv[1])).blobs), cold_s=0, min_bytes=0).num_packs
"""
"""`compact` packs no images before there are many."""
LEFT_OUT = {"optimizer", "incoming"}
WEIGHTS = "model.safetensors"


def make_state(version: str) -> Path:
    """The archive, which must not exist yet."""
    archive = STATES / f"{version}.tar.xz"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copy(ROOT / "dagster.yaml", folder)
        _run(folder, "demo", *RECIPE)
        _run(folder, "compact", "--min-parts", "1")
        subprocess.run([sys.executable, "-c", PACK, folder / "var"], env=_environment(folder), check=True)
        _run(folder, "evaluate", *RECIPE, "--checkpoint", _base(folder), "--seeds", "1")
        with tarfile.open(archive, "x:xz", preset=9) as file:
            for kept in KEPT:
                file.add(folder / "var" / kept, kept, filter=_reduced)
    return archive


def _base(folder: Path) -> str:
    (path,) = (folder / "var" / "checkpoints").glob("base-*")
    return path.name


def _reduced(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    path = Path(member.name)
    is_left_out = bool(LEFT_OUT & {*path.parts}) or path.name.startswith(".") or path.suffix == ".lock"
    has_other_weights = path.name == WEIGHTS and not path.parent.name.startswith("base-")
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return None if is_left_out or has_other_weights else member


def _run(folder: Path, *words: str) -> None:
    command = [sys.executable, "-m", "osworld_pipeline.cli", *words]
    subprocess.run(command, cwd=folder, env=_environment(folder), check=True)


def _environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "DAGSTER_HOME": str(folder), "PYTHONPATH": str(ROOT)}


if __name__ == "__main__":
    from surface import surface  # of this folder, which is on the search path of a script

    made = make_state(sys.argv[1])
    (STATES / f"{sys.argv[1]}.json").write_text(json.dumps(surface(), indent=0, sort_keys=True) + "\n")
    print(f"{made}: {made.stat().st_size:,} bytes")
