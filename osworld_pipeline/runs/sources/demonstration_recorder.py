"""The turns of a demonstration while it is played: the same screenshots and observation text as in a rollout, in the
dialect in which demonstrations are stored."""

import asyncio
from collections.abc import Mapping
from typing import Any

from osworld_pipeline.agent.images import ModelImage, prepare_screenshot
from osworld_pipeline.agent.observation_text import (
    LastAction,
    assistant_message,
    observation_text,
    system_message,
    user_message,
)
from osworld_pipeline.datasets.demonstrations import Demonstration
from osworld_pipeline.dialects import STORED_DIALECT, load_dialect
from osworld_pipeline.domain.observation import Observation
from osworld_pipeline.domain.task import Task
from osworld_pipeline.errors import ReplicaError
from osworld_pipeline.recipes.schema import AgentSection


class DemonstrationRecorder:
    def __init__(self, task: Task, agent: AgentSection) -> None:
        self._task, self._agent, self._dialect = task, agent, load_dialect(STORED_DIALECT)
        self._messages: list[dict[str, Any]] = [system_message(self._dialect.system_prompt(agent.system_prompt))]
        self._images: list[bytes] = []

    @property
    def num_turns(self) -> int:
        return len(self._images)

    async def add(self, observation: Observation, arguments: Mapping[str, Any], *, description: str) -> str:
        """Adds a turn on this screen, and returns its command. Points of `arguments` are pixels of the screen.

        Raises:
            ReplicaError: the screenshot is not an image.
        """
        try:
            image = await asyncio.to_thread(
                prepare_screenshot, observation.screenshot, self._agent.max_pixels, screen_size=observation.screen_size
            )
        except ValueError as error:
            raise ReplicaError(str(error)) from error
        text = observation_text(
            observation,
            self._task,
            step_index=self.num_turns,
            last_action=LastAction() if self.num_turns else None,
            a11y_max_length=self._agent.a11y_max_length,
        )
        on_image = arguments_on_image(arguments, image)
        self._messages += [user_message(text), assistant_message(self._dialect.format(description, on_image))]
        self._images.append(image.data)
        return self._dialect.to_command(on_image, image.to_screen)

    def finish(self, reward: float) -> Demonstration:
        return Demonstration(
            task_id=self._task.task_id, messages=tuple(self._messages), images=tuple(self._images), reward=reward
        )


def arguments_on_image(arguments: Mapping[str, Any], image: ModelImage) -> dict[str, Any]:
    """Tool-call arguments with points mapped from the screen to the image that the model sees."""
    moved = dict(arguments)
    for key in ("coordinate", "end_coordinate"):
        if key in moved:
            moved[key] = list(image.from_screen(*moved[key]))
    return moved
