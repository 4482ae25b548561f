"""Builds requests to an sglang server's /generate, and validates its answers: they are read completely or refused.

sglang expands image placeholders itself, so each image is sent as one placeholder; the prompt that sglang reports must
have exactly the requested ids.
"""

import base64
import math
from collections.abc import Container, Mapping, Sequence
from typing import Any

import orjson

from osworld_pipeline.agent.renderer import Renderer
from osworld_pipeline.errors import EngineError
from osworld_pipeline.protocols import GenerateRequest, GenerateResult
from osworld_pipeline.rollout.engines.http_calls import TransientError
from osworld_pipeline.rollout.engines.sglang_weights import Label

SEED_RANGE = 2**31
BAN = -1e9
"""Added to a logit: its probability becomes exactly 0 at any temperature and in every dtype of logits."""


class UnknownWeightsError(TransientError):
    """A server answered with weights that this engine has not received."""


def generate_body(request: GenerateRequest, renderer: Renderer, *, banned_ids: Sequence[int], **extra: Any) -> bytes:
    """The JSON of a request. Banned ids are never sampled, and the log-probabilities are over the others.

    Raises:
        EngineError: the numbers of images and of placeholder runs differ.
    """
    token_ids = one_placeholder_each(request.token_ids, renderer.image_id)
    num_placeholders = token_ids.count(renderer.image_id)
    if num_placeholders != len(request.images):
        raise EngineError(
            f"the request is malformed: {num_placeholders} runs of image placeholders and {len(request.images)} images"
        )
    sampling = request.sampling
    body: dict[str, Any] = {
        "input_ids": token_ids,
        "sampling_params": {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_new_tokens": sampling.max_new_tokens,
            "stop": list(sampling.stop),
            "stop_token_ids": sorted({renderer.im_end_id, renderer.tokenizer.pad_token_id}),
            # Added to the logits before any other computation.
            "logit_bias": {str(token_id): BAN for token_id in banned_ids},
            "sampling_seed": sampling.seed % SEED_RANGE,
            "no_stop_trim": True,
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
        },
        "return_logprob": True,
        "return_prompt_token_ids": True,
        **extra,
    }
    if request.images:
        body["image_data"] = [base64.b64encode(image).decode() for image in request.images]
    return orjson.dumps(body)


def with_adapter(body: bytes, name: str) -> bytes:
    """A request that samples with a LoRA adapter that the server has loaded."""
    return body[:-1] + b',"lora_path":' + orjson.dumps(name) + b"}"


def one_placeholder_each(token_ids: Sequence[int], image_id: int) -> list[int]:
    """Replaces each run of image placeholders by one."""
    return [
        token_id
        for index, token_id in enumerate(token_ids)
        if token_id != image_id or index == 0 or token_ids[index - 1] != image_id
    ]


def read_answer(
    answer: Mapping[str, Any],
    request: GenerateRequest,
    renderer: Renderer,
    *,
    versions: Mapping[str, int],
    banned_ids: Container[int],
) -> GenerateResult:
    """`versions`: the policy version of each name of weights.

    Raises:
        UnknownWeightsError: the weights are unknown to this engine.
        TransientError: the server aborted the request, or its answer is incomplete.
        EngineError: its prompt is not the one that was sent, or it sampled a banned id.
    """
    meta = answer.get("meta_info")
    token_ids = answer.get("output_ids")
    if not isinstance(meta, dict) or not isinstance(token_ids, list) or not token_ids:
        raise TransientError("the server's answer has no sampled tokens")
    reason = (meta.get("finish_reason") or {}).get("type")
    if reason not in ("stop", "length"):
        message = (meta.get("finish_reason") or {}).get("message") or "no reason given"
        # A server also aborts requests while its weights change (engine.running_responses), which is not a failure.
        is_busy = reason == "abort"
        raise TransientError(f"the server ended the request early ({reason}: {str(message)[:200]})", is_busy=is_busy)
    logprobs = _logprobs(meta, token_ids)
    _check_prompt(answer, meta, request)
    token_versions = _policy_versions(meta, len(token_ids), versions)
    for token_id in token_ids:
        if token_id in banned_ids:
            raise EngineError(f"the server sampled the banned id {token_id}: it ignores logit_bias")
    return GenerateResult(
        text=renderer.decode_response(token_ids),
        token_ids=tuple(token_ids),
        logprobs=logprobs,
        policy_version=token_versions[0],
        policy_versions=token_versions if len(set(token_versions)) > 1 else (),
        finish_reason=reason,
    )


def read_scores(answer: Mapping[str, Any]) -> list[float]:
    """Log-probabilities of the ids that `token_ids_logprob` named, in their order, for the first sampled token.

    Raises:
        TransientError: the answer has none.
    """
    try:
        return [float(entry[0]) for entry in answer["meta_info"]["output_token_ids_logprobs"][0]]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise TransientError("the server does not score the requested tokens") from error


def _logprobs(meta: Mapping[str, Any], token_ids: Sequence[int]) -> tuple[float, ...]:
    entries = meta.get("output_token_logprobs")
    if not isinstance(entries, list) or [entry[1] for entry in entries] != token_ids:
        raise TransientError("the server's log-probabilities do not belong to the tokens that it sampled")
    logprobs = tuple(entry[0] for entry in entries)
    if not all(isinstance(value, float | int) and math.isfinite(value) for value in logprobs):
        raise TransientError("the server gave a log-probability that is not a finite number")
    return logprobs


def _check_prompt(answer: Mapping[str, Any], meta: Mapping[str, Any], request: GenerateRequest) -> None:
    prompt = answer.get("prompt_token_ids")
    is_same = prompt == list(request.token_ids) if prompt else meta.get("prompt_tokens") == len(request.token_ids)
    if not is_same:
        raise EngineError(
            f"the server built another prompt than the one sent ({meta.get('prompt_tokens')} tokens of "
            f"{len(request.token_ids)}): check that it has the tokenizer and the image processor of this checkpoint"
        )


def _policy_versions(meta: Mapping[str, Any], num_tokens: int, versions: Mapping[str, int]) -> tuple[int, ...]:
    """The version of each token: from the spans that the server reports, or else from the weights at the end."""
    spans = meta.get("weight_versions") or [{"version": meta.get("weight_version"), "start": 0, "end": num_tokens}]
    token_versions: list[int] = []
    for span in spans:
        name = Label.parse(str(span["version"])).weights
        if name not in versions:
            raise UnknownWeightsError(f"the server answered with weights that this engine has not received ({name})")
        token_versions += [versions[name]] * (span["end"] - span["start"])
    if len(token_versions) != num_tokens:
        raise TransientError("the server's weight versions do not cover the tokens that it sampled")
    return tuple(token_versions)
