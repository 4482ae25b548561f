"""A recorded trajectory as chat turns, in the form of a demonstration recorded here: the same system prompt,
observation text and dialect."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from osworld_pipeline.agent.observation_text import (
    LastAction,
    assistant_message,
    cut_text,
    observation_text,
    system_message,
    user_message,
)
from osworld_pipeline.datasets.importers.calls import Arguments
from osworld_pipeline.dialects import Dialect, load_dialect
from osworld_pipeline.domain.observation import Observation
from osworld_pipeline.domain.task import Task

SYSTEM_PROMPT = "full"
MAX_DESCRIPTION_CHARS = 400
"""Maximum length of the `Action:` line; longer text is cut after a sentence, or at this length."""
_ACTION_LINE = re.compile(r"^[#*\s]*Action:[*\s]*(?!\s*(?:WAIT|DONE|FAIL)\b)([^\n<{`]{3,})", re.MULTILINE)
_SENTENCE_END = re.compile(r"(?<=[.!?])\s")


@dataclass
class Conversation:
    """Grows turn by turn; `messages` and `images` are a demonstration's."""

    task: Task
    dialect: Dialect = field(default_factory=lambda: load_dialect("slime"))
    messages: list[dict[str, Any]] = field(default_factory=list)
    images: list[str] = field(default_factory=list)
    num_turns: int = 0

    def add_step(self, image: str | None, actions: Sequence[Arguments], *, said: str) -> None:
        """Adds one recorded step: a turn for each of its actions. All turns have the step's image, the only one
        recorded. `said`: the recorded text of the step; it goes with the last action, and earlier actions get a
        description. `image` is None if the screen was not recorded."""
        if not self.messages:
            self.messages.append(system_message(self.dialect.system_prompt(SYSTEM_PROMPT)))
        for index, arguments in enumerate(actions):
            is_last = index == len(actions) - 1
            description = described(said) if is_last else ""
            user = user_message(step_text(self.task, self.num_turns))
            if image is None:
                user["content"] = [part for part in user["content"] if part["type"] != "image"]
            else:
                self.images.append(image)
            self.messages += [
                user,
                assistant_message(self.dialect.format(description or describe(arguments), arguments)),
            ]
            self.num_turns += 1


def step_text(task: Task, step_index: int) -> str:
    """The text next to a screenshot when neither tree nor terminal was recorded."""
    return observation_text(
        Observation(screenshot=b""),
        task,
        step_index=step_index,
        last_action=LastAction() if step_index else None,
        a11y_max_length=0,
    )


def described(said: str) -> str:
    """Recorded text as one line: its `Action:` line if there is one, else its first sentences."""
    match = _ACTION_LINE.search(said)
    text = " ".join((match[1] if match else said).split())
    if match is None and len(text) > MAX_DESCRIPTION_CHARS:
        kept = ""
        for sentence in _SENTENCE_END.split(text):
            if kept and len(kept) + len(sentence) >= MAX_DESCRIPTION_CHARS:
                break
            kept = f"{kept} {sentence}".strip()
        text = kept
    return cut_text(text, MAX_DESCRIPTION_CHARS).split("\n")[0]


def describe(arguments: Mapping[str, Any]) -> str:
    """A short sentence for an action without a description. It names no point, because scaling the image changes it."""
    match arguments:
        case {"action": "type", "text": str(text)}:
            return f"Type {text[:60]}"
        case {"action": "key", "keys": [*keys]}:
            return f"Press {'+'.join(keys)}"
        case {"action": "scroll", "direction": direction}:
            return f"Scroll {direction}"
        case {"action": "terminate", "status": status}:
            return "The task is done" if status == "success" else "The task cannot be done"
        case {"action": str(action)}:
            return _DESCRIPTIONS[action]
        case _:
            raise AssertionError(arguments)


_DESCRIPTIONS = {
    "left_click": "Click",
    "right_click": "Right-click",
    "middle_click": "Middle-click",
    "double_click": "Double-click",
    "triple_click": "Triple-click",
    "mouse_move": "Move the pointer",
    "left_click_drag": "Drag",
    "wait": "Wait",
}
