"""How answers are written: off the event loop where a screenshot is in them."""

import asyncio
import base64
from typing import Any

from fastapi import Response

from osworld_pipeline.domain.observation import Observation
from osworld_pipeline.wire import ErrorMessage, Fault, Message


async def json_answer(message: Message, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A megabyte of base64 takes milliseconds to write, which other episodes would wait for."""
    body = await asyncio.to_thread(message.model_dump_json)
    return Response(body, status_code=status, headers=headers, media_type="application/json")


def error_answer(sentence: str, fault: Fault, status: int, headers: dict[str, str] | None = None) -> Response:
    body = ErrorMessage(error=sentence, fault=fault).model_dump_json()
    return Response(body, status_code=status, headers=headers, media_type="application/json")


async def observation_fields(observation: Observation) -> dict[str, Any]:
    """The fields of an ObservationMessage."""
    encoded = await asyncio.to_thread(base64.b64encode, observation.screenshot)
    return {
        "accessibility_tree": observation.accessibility_tree,
        "terminal": observation.terminal,
        "instruction": observation.instruction,
        "screenshot_base64": encoded.decode("ascii"),
        "screenshot_format": observation.image_format,
    }
