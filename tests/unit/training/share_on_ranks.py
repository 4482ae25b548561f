"""What the test of shared trajectories runs on each rank: one update, and which images each rank read and decoded."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from train_on_ranks import demonstrations, recipe_of, run

from osworld_pipeline.agent import model_inputs
from osworld_pipeline.domain.digest import digest_bytes
from osworld_pipeline.domain.trajectory import LazyImages, Trajectory
from osworld_pipeline.errors import StoreError
from osworld_pipeline.store.blobs import BlobStore
from osworld_pipeline.training.distributed.process_group import ProcessGroup
from osworld_pipeline.training.policy_trainer import open_sft_trainer


def stored(trajectories: list[Trajectory], blobs: BlobStore) -> list[Trajectory]:
    """The same trajectories with their images in the store."""
    return [
        replace(item, images=LazyImages(blobs.read, [blobs.write(image, suffix="png") for image in item.images]))
        for item in trajectories
    ]


def update(process_group: ProcessGroup, model: Path, blobs: BlobStore, *, is_visible: bool) -> dict[str, Any]:
    read: list[str] = []
    decoded: list[str] = []
    encode = model_inputs.encode_image

    def counted(processor: Any, image: bytes) -> Any:
        decoded.append(digest_bytes(image))
        return encode(processor, image)

    def read_image(sha256: str) -> bytes:
        if not (is_visible or process_group.is_main):
            raise StoreError(f"image {sha256} is not here")
        read.append(sha256)
        return blobs.read(sha256)

    model_inputs.encode_image = counted
    losses: list[float] = []
    try:
        trainer = open_sft_trainer(model, recipe=recipe_of("plain"), process_group=process_group, read_image=read_image)

        def work() -> None:
            losses.append(trainer.update(stored(demonstrations(trainer.processor, 0), blobs))["loss"])

        run(trainer, process_group, work)
    finally:
        model_inputs.encode_image = encode
    reported = process_group.gather({"read": read, "decoded": decoded})
    return {"ranks": reported, "losses": losses}


def share(process_group: ProcessGroup, model: Path, out: Path) -> None:
    blobs = BlobStore(out.parent / "blobs")
    reported = {
        name: update(process_group, model, blobs, is_visible=is_visible)
        for name, is_visible in (("visible", True), ("hidden", False))
    }
    if process_group.is_main:
        out.write_text(json.dumps(reported))
