"""Prompts of an environment: text and encoded screenshots in order, as parts or as OSGym's single string.

OSGym's string holds a screenshot as `<|vision_start|>BASE64<|vision_end|>`. Text between these tags that is not an
image stays text, because an instruction or an action may contain anything.
"""

import base64
import binascii
import re
from collections.abc import Sequence
from typing import Any

from osworld_pipeline.domain.pictures import NO_PICTURE, open_picture

VISION_START, VISION_END = "<|vision_start|>", "<|vision_end|>"
_TAGGED = re.compile(r"<\|vision_start\|>([A-Za-z0-9+/=\s]+)<\|vision_end\|>")


class Markup(str):
    """Text in which the names of special tokens are these tokens. In other text they are plain characters, so that
    neither a task nor a model can end a turn or show an image."""

    __slots__ = ()


Part = str | bytes
"""Text, or an encoded image."""
Prompt = tuple[Part, ...]


def read_prompt(observation: Any) -> Prompt:
    """Reads an environment's `obs`: parts, or OSGym's string.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(observation, str):
        return _read_tagged(observation)
    if isinstance(observation, Sequence) and all(isinstance(part, str | bytes) for part in observation):
        return tuple(observation)
    raise ValueError(
        f"an observation must be text, or a sequence of texts and encoded images, not {type(observation).__name__}"
    )


def write_prompt(prompt: Sequence[Part]) -> str:
    """The prompt as OSGym's single string."""
    return "".join(
        part if isinstance(part, str) else f"{VISION_START}{base64.b64encode(part).decode()}{VISION_END}"
        for part in prompt
    )


def without_oldest(prompt: Prompt) -> Prompt | None:
    """Removes the oldest screenshot and its response, or without screenshots the oldest text after the first. Returns
    None if only the task and the newest screenshot remain."""
    images = [index for index, part in enumerate(prompt) if isinstance(part, bytes)]
    if len(images) > 1:
        return prompt[: images[0]] + prompt[images[1] :]
    if not images and len(prompt) > 2:
        return prompt[:1] + prompt[2:]
    return None


def _read_tagged(text: str) -> Prompt:
    parts: list[Part] = []
    end = 0
    for match in _TAGGED.finditer(text):
        image = _image_in(match[1])
        if image is None:
            continue
        parts += [text[end : match.start()], image]
        end = match.end()
    return tuple(part for part in (*parts, text[end:]) if part)


def _image_in(encoded: str) -> bytes | None:
    try:
        data = base64.b64decode("".join(encoded.split()), validate=True)
        with open_picture(data):
            return data
    except (binascii.Error, *NO_PICTURE):
        return None
