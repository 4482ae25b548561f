"""Environments without desktops, light to import: each runs in a process of its own."""

import base64
import io
import os
import time
from typing import Any

from PIL import Image

from osworld_pipeline.errors import ReplicaError


def picture(shade: int, size: tuple[int, int] = (64, 64)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, (shade % 256,) * 3).save(buffer, format="PNG")
    return buffer.getvalue()


class CountingEnv:
    """An episode of `num_steps` steps, rewarded with `reward` at its end. `shows`: text, parts or tagged."""

    def __init__(self, env_config: dict[str, Any], worker_id: int) -> None:
        self.config = {"num_steps": 2, "reward": 1.0, "shows": "parts", **env_config}
        self.worker_id = worker_id
        self.num_episodes = self.num_steps = 0
        self.history: list[Any] = []
        self._note("made")

    def reset(self) -> tuple[dict[str, Any], dict[str, Any]]:
        self.num_episodes += 1
        self.num_steps = 0
        self.history = [f"task of {self.worker_id}", self._screen()]
        return {"obs": self._obs(), "done": False, "is_init": True}, self._meta_info()

    def step(self, action: str) -> tuple[dict[str, Any], dict[str, Any]]:
        previous = self._obs()
        self._misbehave(action)
        self.num_steps += 1
        self.history += [action, self._screen()]
        done = self.num_steps >= self.config["num_steps"]
        reward = self.config["reward"] if done else 0.0
        reported = {"prev_obs": previous, "action": action, "obs": self._obs(), "is_init": False}
        return {**reported, "reward": reward, "done": done}, self._meta_info()

    def close(self) -> None:
        self._note("closed")

    def _misbehave(self, action: str) -> None:
        if "die" in action and self.num_episodes == 1:
            os._exit(3)
        if "fault" in action and (self.num_episodes == 1 or self.config.get("always")):
            raise ReplicaError("the desktop died")
        if "bug" in action and self.num_episodes == 1:
            raise KeyError("a bug")
        if "sleep" in action:
            time.sleep(60)

    def _meta_info(self) -> dict[str, Any]:
        return {"uid": f"{self.worker_id}-{os.getpid()}-{self.num_episodes}"}

    def _screen(self) -> bytes:
        return picture(40 * self.num_steps + self.worker_id)

    def _obs(self) -> Any:
        if self.config["shows"] == "parts":
            return tuple(self.history)
        if self.config["shows"] == "text":
            return "".join(part for part in self.history if isinstance(part, str))
        return "".join(
            part if isinstance(part, str) else f"<|vision_start|>{base64.b64encode(part).decode()}<|vision_end|>"
            for part in self.history
        )

    def _note(self, what: str) -> None:
        if "notes" in self.config:
            with open(self.config["notes"], "a", encoding="utf-8") as file:
                file.write(f"{what} {self.worker_id} {os.getpid()}\n")
