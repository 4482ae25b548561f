import base64
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_policy_server import Answer, FakeSglang, serving

from osworld_pipeline.domain.episode import SamplingParams
from osworld_pipeline.errors import EngineError
from osworld_pipeline.protocols import ChatTurn, GenerateRequest
from osworld_pipeline.recipes.schema import EngineSection
from osworld_pipeline.rollout.engines.openai import OpenAiEngine, cut_at_stop, with_stop

PATH = "/v1/chat/completions"
PNG = b"\x89PNG\r\n\x1a\nrest"
JPEG = b"\xff\xd8\xffrest"


@pytest.fixture
def fake() -> Iterator[FakeSglang]:
    with serving(FakeSglang(reply=(1,), image_id=0)) as server:
        yield server


@asynccontextmanager
async def engine_of(fake: FakeSglang, **options: Any) -> AsyncIterator[OpenAiEngine]:
    section = EngineSection(
        kind="openai",
        urls=(f"{fake.url}/v1",),
        model="words-1",
        request_timeout_s=options.pop("request_timeout_s", 5.0),
        retry_budget_s=options.pop("retry_budget_s", 5.0),
        health_timeout_s=2.0,
    )
    engine = OpenAiEngine(section.urls[0], section=section, **options)
    try:
        yield engine
    finally:
        await engine.close()


def request_of(**sampling: Any) -> GenerateRequest:
    return GenerateRequest(
        sampling=SamplingParams(**{"temperature": 0.6, "top_p": 0.9, "max_new_tokens": 50, "seed": 3, **sampling}),
        turns=(
            ChatTurn(role="system", text="You operate a computer."),
            ChatTurn(role="user", text="Open the editor.", images=(PNG,)),
            ChatTurn(role="assistant", text="Action: click"),
            ChatTurn(role="user", text="And now?", images=(JPEG, PNG)),
        ),
    )


def completion(text: str | None, *, finish_reason: str = "stop", **choice: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": text, **choice.pop("message", {})}
    return {
        "choices": [{"message": message, "finish_reason": finish_reason, **choice}],
        "usage": {"prompt_tokens": 321, "completion_tokens": 12},
    }


async def test_a_conversation_is_sent_with_its_images_before_its_text(fake: FakeSglang) -> None:
    fake.bodies = [completion("Done.")]
    async with engine_of(fake) as engine:
        result = await engine.generate(request_of())
    assert (result.text, result.finish_reason) == ("Done.", "stop")
    assert (result.prompt_num_tokens, result.response_num_tokens) == (321, 12)
    assert result.token_ids == ()
    assert result.logprobs == ()
    body = fake.requests(PATH)[0]
    assert body["model"] == "words-1"
    assert (body["temperature"], body["top_p"], body["max_tokens"], body["seed"]) == (0.6, 0.9, 50, 3)
    assert body["stop"] == ["</tool_call>"]
    assert [message["role"] for message in body["messages"]] == ["system", "user", "assistant", "user"]
    assert body["messages"][0]["content"] == "You operate a computer."
    first, second, words = body["messages"][3]["content"]
    assert first["image_url"]["url"] == f"data:image/jpeg;base64,{base64.b64encode(JPEG).decode()}"
    assert second["image_url"]["url"].startswith("data:image/png;base64,")
    assert words == {"type": "text", "text": "And now?"}


async def test_a_refusal_is_the_model_s_answer(fake: FakeSglang) -> None:
    fake.bodies = [completion(None, message={"refusal": "I cannot help with that."})]
    async with engine_of(fake) as engine:
        assert (await engine.generate(request_of())).text == "I cannot help with that."


async def test_a_content_filter_gives_an_empty_answer(fake: FakeSglang) -> None:
    fake.bodies = [completion(None, finish_reason="content_filter")]
    async with engine_of(fake) as engine:
        result = await engine.generate(request_of())
    assert (result.text, result.finish_reason) == ("", "content_filter")


async def test_an_answer_that_is_cut_at_its_limit_has_the_finish_reason_length(fake: FakeSglang) -> None:
    fake.bodies = [completion("<tool_call> and so", finish_reason="length")]
    async with engine_of(fake) as engine:
        result = await engine.generate(request_of())
    assert (result.text, result.finish_reason) == ("<tool_call> and so", "length")


async def test_the_engine_waits_after_too_many_requests(fake: FakeSglang) -> None:
    fake.instead[PATH] = [Answer(status=429, headers=(("Retry-After", "0.05"),))] * 2
    fake.bodies = [completion("Done.")]
    async with engine_of(fake) as engine:
        assert (await engine.generate(request_of())).text == "Done."
    assert len(fake.calls) == 3


async def test_the_token_limit_is_sent_under_the_other_name_if_the_model_requires_it(fake: FakeSglang) -> None:
    sentence = b'{"error": {"message": "Unsupported parameter: use \'max_completion_tokens\' instead."}}'
    fake.instead[PATH] = [Answer(status=400, body=sentence)]
    fake.bodies = [completion("Done."), completion("Done.")]
    async with engine_of(fake) as engine:
        await engine.generate(request_of())
        await engine.generate(request_of())
    assert [("max_completion_tokens" in body) for body in fake.requests(PATH)] == [False, True, True]


async def test_a_refused_token_is_never_shown(fake: FakeSglang, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    fake.instead[PATH] = [Answer(status=401, body=b'{"error": "bad key sk-secret"}')]
    async with engine_of(fake, token="sk-secret") as engine:
        with pytest.raises(EngineError, match="refused the token") as caught:
            await engine.generate(request_of())
    assert "sk-secret" not in str(caught.value) + caplog.text + repr(engine)
    assert fake.tokens == ["Bearer sk-secret"]


async def test_an_answer_that_is_not_a_completion_is_an_error(fake: FakeSglang) -> None:
    fake.bodies = [{"choices": []}]
    async with engine_of(fake) as engine:
        with pytest.raises(EngineError, match="holds no choice"):
            await engine.generate(request_of())


async def test_a_request_with_only_token_ids_is_refused(fake: FakeSglang) -> None:
    async with engine_of(fake) as engine:
        with pytest.raises(EngineError, match="needs a conversation"):
            await engine.generate(GenerateRequest(sampling=SamplingParams(temperature=1.0), token_ids=(1, 2)))
    assert fake.calls == []


async def test_the_health_check_reports_a_model_that_the_endpoint_lacks(fake: FakeSglang) -> None:
    fake.bodies = [{"data": [{"id": "words-2"}]}, {"data": [{"id": "words-1"}]}]
    async with engine_of(fake) as engine:
        with pytest.raises(EngineError, match=r"no model words-1.*words-2"):
            await engine.health()
        await engine.health()
        # An endpoint that lists no models answers 404, and this counts as healthy.
        await engine.health()


async def test_weights_cannot_be_loaded_into_an_endpoint(fake: FakeSglang) -> None:
    async with engine_of(fake) as engine:
        with pytest.raises(EngineError, match=r"engine\.kind"):
            await engine.load_weights(Path("checkpoint"), policy_version=1)


def test_an_endpoint_needs_the_name_of_its_model() -> None:
    with pytest.raises(EngineError, match=r"engine\.model"):
        OpenAiEngine("http://127.0.0.1:1/v1", section=EngineSection())


@pytest.mark.parametrize(
    ("text", "stops", "choice", "whole"),
    [
        ("<tool_call>click", ("</tool_call>",), {}, "<tool_call>click</tool_call>"),
        ("I am done.", ("</tool_call>",), {}, "I am done."),
        ("<tool_call>a</tool_call> and more", ("</tool_call>",), {}, "<tool_call>a</tool_call>"),
        ("<|action_start|>click()", ("<|action_end|>",), {}, "<|action_start|>click()<|action_end|>"),
        ("", ("</action>", "<done/>"), {"stop_reason": "<done/>"}, "<done/>"),
        ("", ("</action>", "<done/>"), {"matched_stop": 151645}, ""),
    ],
)
def test_the_stop_string_stays_in_the_text(
    text: str, stops: tuple[str, ...], choice: dict[str, Any], whole: str
) -> None:
    assert with_stop(text, stops, choice) == whole


async def test_a_stop_string_that_could_not_be_sent_is_applied_by_the_engine(fake: FakeSglang) -> None:
    fake.bodies = [completion("All good. <done/> And furthermore")]
    async with engine_of(fake) as engine:
        result = await engine.generate(request_of(stop=("</action>", "<done/>")))
    assert result.text == "All good. <done/>"
    assert fake.requests(PATH)[0]["stop"] == ["</action>"]


def test_the_earliest_stop_ends_the_text() -> None:
    assert cut_at_stop("a<y/>b<x/>c", ("<x/>", "<y/>")) == "a<y/>"
