"""Small conversations with pictures, as trajectories."""

import io
import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from PIL import Image, ImageDraw
from safetensors.torch import load_file

from osworld_pipeline.agent.observation_text import assistant_message, system_message, user_message
from osworld_pipeline.agent.renderer import Renderer, render_demonstration
from osworld_pipeline.domain.trajectory import Trajectory
from osworld_pipeline.recipes.schema import TinyModelSection
from osworld_pipeline.training.between_passes import Consume
from osworld_pipeline.training.objective.score import score_trajectories

SMALL = TinyModelSection(
    kind="tiny", hidden_size=64, num_layers=2, vision_hidden_size=48, vision_depth=1, vocab_size=400, seed=1
)
CORPUS = [
    "system\nYou operate a computer.",
    *[f'Action: click\n<tool_call>{{"name":"computer_use","arguments":{{"x":{i}}}}}</tool_call>' for i in range(20)],
]


def saved_weights(folder: Path) -> dict[str, torch.Tensor]:
    """What a checkpoint folder holds: whole weights, or an adapter's factors."""
    whole, adapter = folder / "model.safetensors", folder / "adapter" / "adapter_model.safetensors"
    assert whole.is_file() != adapter.is_file(), folder
    return load_file(whole if whole.is_file() else adapter)


def saved_metrics(folder: Path) -> dict[str, float]:
    """What a checkpoint records of its last update, without times and padding, which depend on the ranks."""
    metrics = json.loads((folder / "trainer_state.json").read_text())["metrics"]
    return {name: value for name, value in metrics.items() if not name.endswith(("_s", "padding_share"))}


def picture(number: int, *, width: int = 96, height: int = 64) -> bytes:
    image = Image.new("RGB", (width, height), (200, 200, 200))
    left = number * 13 % (width - 24)
    ImageDraw.Draw(image).rectangle((left, 8, left + 20, 40), fill=(number * 37 % 255, 60, 160))
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


def conversation(processor, number: int, *, num_turns: int = 2, words: str = "click") -> Trajectory:
    messages = [system_message("You operate a computer.")]
    for turn in range(num_turns):
        messages += [user_message(f"[Task]\nDo {number}"), assistant_message(f"Action: {words} {number + turn}")]
    images = [picture(number + turn) for turn in range(num_turns)]
    rendered = render_demonstration(Renderer(processor), messages, images)
    return Trajectory(
        trajectory_id=f"t{number}",
        task_id=f"task{number}",
        token_ids=rendered.token_ids,
        response_mask=rendered.mask,
        images=rendered.images,
    )


def as_sampled(model, processor, trajectories: list[Trajectory], advantages: list[float]) -> list[Trajectory]:
    """The trajectories as if `model` had sampled them."""
    logprobs = score_trajectories(model, processor, trajectories)
    return [
        replace(trajectory, sampled_logprobs=tuple(row.tolist()), advantage=advantage)
        for trajectory, row, advantage in zip(trajectories, logprobs, advantages, strict=True)
    ]


class Scripted:
    """Scripted arrivals of an update: each receiver is due from the nth look on, and the canaries come last."""

    def __init__(self, receivers: Sequence[tuple[int, Consume]], canaries: Callable[[], Sequence[Trajectory]]) -> None:
        self._receivers = deque(receivers)
        self._canaries = canaries
        self.num_looks = 0

    def due(self) -> Consume | None:
        self.num_looks += 1
        return self._receivers.popleft()[1] if self._receivers and self._receivers[0][0] <= self.num_looks else None

    def next(self) -> Consume | Sequence[Trajectory]:
        return self._receivers.popleft()[1] if self._receivers else self._canaries()
