"""Reads an export of turns for AReaL: every such export has a copy of this file. It needs only torch and safetensors.

    for turn in read_turns("OUTPUT"): ...          # all, episode by episode
    turns = read_episode("OUTPUT/episodes/x.safetensors")

Each turn is the dictionary that AReaL's trainer expects for one sequence (a leading batch dimension of 1)."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def read_turns(folder: str | Path) -> Iterator[dict[str, Any]]:
    root = Path(folder)
    with (root / "episodes.jsonl").open(encoding="utf-8") as lines:
        for line in lines:
            yield from read_episode(root / json.loads(line)["file"])


def read_episode(path: str | Path) -> list[dict[str, Any]]:
    """The episode's turns in order. If the export has images, `multi_modal_input` has one entry for each sequence, an
    empty one for a turn without images. Otherwise there is no such key, like in AReaL's text-only stage."""
    import torch
    from safetensors import safe_open

    turns: list[dict[str, Any]] = []
    with safe_open(path, "pt") as file:
        about = json.loads(file.metadata()["turns"])
        names = file.keys()
        for index, turn in enumerate(about["images"]):
            prefix = f"turns/{index}/"
            tensors: dict[str, Any] = {
                name.removeprefix(prefix): file.get_tensor(name) for name in names if name.startswith(prefix)
            }
            if about["is_multimodal"]:
                pixels = [file.get_tensor(f"images/{image}/pixel_values") for image in turn]
                grids = [file.get_tensor(f"images/{image}/image_grid_thw") for image in turn]
                seen = {"pixel_values": torch.cat(pixels), "image_grid_thw": torch.cat(grids)} if turn else {}
                tensors["multi_modal_input"] = [seen]
            turns.append(tensors)
    return turns
