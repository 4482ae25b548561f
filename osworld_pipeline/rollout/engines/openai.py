"""Queries an OpenAI-compatible endpoint (/chat/completions): text and images in, text out, for evaluation only.

It returns no ids and no log-probabilities, so the responses cannot be trained on. A refusal or filtered content of a
closed model counts as its answer, not as a fault.
"""

import asyncio
import base64
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import orjson

from osworld_pipeline.domain.episode import SamplingParams
from osworld_pipeline.errors import EngineError
from osworld_pipeline.protocols import ChatTurn, GenerateRequest, GenerateResult
from osworld_pipeline.recipes.schema import EngineSection
from osworld_pipeline.rollout.engines.http_calls import JsonClient, TransientError, shown, within_budget

MAX_STOPS = 4
"""Maximum number of stop strings that an endpoint accepts; further ones are applied here."""
OPENINGS = (("</", "<"), ("_end|>", "_start|>"))
"""Maps a closing tag to its opening tag."""
MEDIA_TYPES = {b"\x89PNG": "image/png", b"\xff\xd8\xff": "image/jpeg", b"RIFF": "image/webp", b"GIF8": "image/gif"}


class OpenAiEngine:
    name = "openai"
    uses_chat_api = True

    def __init__(
        self,
        url: str,
        *,
        section: EngineSection,
        policy_version: int = 0,
        token: str | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """`url` ends in /v1. Use it from one event loop."""
        if not section.model:
            raise EngineError(f"engine.model is not set: name a model of {shown(url)}")
        self._url = url.strip().rstrip("/")
        self._section = section
        self._version = policy_version
        self._client = JsonClient(token=token, transport=transport)
        self._limit_key = "max_tokens"

    @property
    def policy_version(self) -> int:
        return self._version

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        if not request.turns:
            raise EngineError("an OpenAI-compatible endpoint needs a conversation, and the request has none")
        attempt = functools.partial(self._attempt, request)
        section = self._section
        answer = await within_budget(attempt, timeout_s=section.request_timeout_s, budget_s=section.retry_budget_s)
        return read_answer(answer, request.sampling, policy_version=self._version)

    async def load_weights(self, path: Path, *, policy_version: int) -> None:
        raise EngineError(
            f"the weights behind {shown(self._url)} cannot be changed from here: to sample {path}, set engine.kind to "
            "sglang or transformers"
        )

    async def forget(self, episode_id: str) -> None:
        """No state is kept between turns."""

    async def health(self) -> None:
        """If an endpoint lists models, the list must contain this one; otherwise it must only answer."""
        limit_s = self._section.health_timeout_s
        timeout_s = min(limit_s, self._section.request_timeout_s)
        await within_budget(self._check_model, timeout_s=timeout_s, budget_s=limit_s)

    async def close(self) -> None:
        await self._client.close()

    async def _check_model(self, timeout_s: float) -> None:
        answer = await self._client.get(f"{self._url}/models", timeout_s=timeout_s, allow_missing=True)
        listed = [str(model.get("id")) for model in answer.get("data") or [] if isinstance(model, dict)]
        if listed and self._section.model not in listed:
            raise EngineError(
                f"{shown(self._url)} has no model {self._section.model}: engine.model must be one of "
                f"{', '.join(sorted(listed)[:20])}"
            )

    async def _attempt(self, request: GenerateRequest, timeout_s: float) -> dict[str, Any]:
        body = await asyncio.to_thread(chat_body, request, self._section.model, limit_key=self._limit_key)
        try:
            return await self._client.post(f"{self._url}/chat/completions", body, timeout_s=timeout_s)
        except TransientError:
            raise
        except EngineError as error:
            # Newer models accept only another name of the limit.
            if self._limit_key == "max_tokens" and "max_completion_tokens" in str(error):
                self._limit_key = "max_completion_tokens"
                raise TransientError(str(error), retry_after_s=0.0) from error
            raise


def chat_body(request: GenerateRequest, model: str, *, limit_key: str) -> bytes:
    sampling = request.sampling
    body: dict[str, Any] = {
        "model": model,
        "messages": [_message(turn) for turn in request.turns],
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        limit_key: sampling.max_new_tokens,
        "seed": sampling.seed % 2**31,
    }
    # An endpoint omits the stop string from its answer: send only stop strings that the rest of the answer implies.
    stops = [stop for stop in sampling.stop if _opening(stop) is not None]
    if stops:
        body["stop"] = stops[:MAX_STOPS]
    return orjson.dumps(body)


def read_answer(answer: Mapping[str, Any], sampling: SamplingParams, *, policy_version: int) -> GenerateResult:
    """
    Raises:
        EngineError: the endpoint's answer is not a chat completion.
    """
    try:
        choice = answer["choices"][0]
        message = choice["message"]
        text = str(message.get("content") or message.get("refusal") or "")
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise EngineError("the endpoint's answer holds no choice: is it an OpenAI-compatible endpoint?") from error
    reason = str(choice.get("finish_reason") or "stop")
    usage = answer.get("usage") or {}
    return GenerateResult(
        text=with_stop(text, sampling.stop, choice) if reason == "stop" else cut_at_stop(text, sampling.stop),
        policy_version=policy_version,
        finish_reason=reason,
        prompt_num_tokens=int(usage.get("prompt_tokens") or 0),
        response_num_tokens=int(usage.get("completion_tokens") or 0),
    )


def with_stop(text: str, stops: Sequence[str], choice: Mapping[str, Any]) -> str:
    """Restores the text up to and including its first stop string, which an endpoint omits: the one that it names, or
    else one whose opening tag is still open."""
    if any(stop in text for stop in stops):
        return cut_at_stop(text, stops)
    named = (choice.get("matched_stop"), choice.get("stop_reason"))
    for stop in stops:
        if stop in named or _is_open(text, stop):
            return text + stop
    return text


def cut_at_stop(text: str, stops: Sequence[str]) -> str:
    ends = [text.index(stop) + len(stop) for stop in stops if stop in text]
    return text[: min(ends)] if ends else text


def _is_open(text: str, stop: str) -> bool:
    """Whether the text lacks a closing tag."""
    opening = _opening(stop)
    return opening is not None and text.count(opening) > text.count(stop)


def _opening(stop: str) -> str | None:
    for closing, opening in OPENINGS:
        if closing in stop:
            return stop.replace(closing, opening)
    return None


def _message(turn: ChatTurn) -> dict[str, Any]:
    if not turn.images:
        return {"role": turn.role, "content": turn.text}
    images = [{"type": "image_url", "image_url": {"url": data_uri(image)}} for image in turn.images]
    return {"role": turn.role, "content": [*images, {"type": "text", "text": turn.text}]}


def data_uri(image: bytes) -> str:
    media_type = next((name for magic, name in MEDIA_TYPES.items() if image.startswith(magic)), "image/png")
    return f"data:{media_type};base64,{base64.b64encode(image).decode()}"
