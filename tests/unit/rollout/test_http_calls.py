import asyncio
import logging
import time
from collections.abc import Iterator

import pytest
from fake_policy_server import Answer, FakeSglang, serving

from osworld_pipeline.errors import EngineError
from osworld_pipeline.rollout.engines.http_calls import JsonClient, TransientError, shown, within_budget

PATH = "/model_info"


@pytest.fixture
def fake() -> Iterator[FakeSglang]:
    with serving(FakeSglang(reply=(1,), image_id=0)) as server:
        yield server


async def _get(fake: FakeSglang, *, timeout_s: float = 5.0, token: str | None = None) -> dict[str, object]:
    client = JsonClient(token=token)
    try:
        return await client.get(fake.url + PATH, timeout_s=timeout_s)
    finally:
        await client.close()


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
async def test_a_request_with_a_transient_status_may_be_retried(fake: FakeSglang, status: int) -> None:
    fake.instead[PATH] = [Answer(status=status, body=b'{"error": {"message": "come back"}}')]
    with pytest.raises(TransientError, match=f"{status}: come back"):
        await _get(fake)


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 422])
async def test_a_request_that_was_refused_is_not_tried_again(fake: FakeSglang, status: int) -> None:
    fake.instead[PATH] = [Answer(status=status, body=b'{"detail": "no"}')]
    with pytest.raises(EngineError, match=str(status)) as caught:
        await _get(fake)
    assert not isinstance(caught.value, TransientError)


async def test_a_truncated_answer_is_a_transient_error(fake: FakeSglang) -> None:
    fake.instead[PATH] = [Answer(body=b'{"model_path": "x"}', is_dropped=True)]
    with pytest.raises(TransientError, match="broke"):
        await _get(fake)


async def test_a_request_whose_answer_is_not_a_json_object_may_be_retried(fake: FakeSglang) -> None:
    fake.instead[PATH] = [Answer(body=b"<html>"), Answer(body=b"[1]")]
    for _ in range(2):
        with pytest.raises(TransientError, match="did not answer with a JSON object"):
            await _get(fake)


async def test_a_request_without_an_answer_ends_at_the_limit(fake: FakeSglang) -> None:
    fake.instead[PATH] = [Answer(is_silent=True)]
    start = time.monotonic()
    with pytest.raises(TransientError, match=r"did not answer within 0\.2 s"):
        await _get(fake, timeout_s=0.2)
    assert time.monotonic() - start < 5


async def test_the_error_says_if_no_server_listens() -> None:
    with serving(FakeSglang(reply=(1,), image_id=0)) as gone:
        pass
    with pytest.raises(TransientError, match="no server answers at"):
        await _get(gone)


async def test_a_retry_waits_for_the_time_that_the_server_names(fake: FakeSglang) -> None:
    fake.instead[PATH] = [Answer(status=429, headers=(("Retry-After", "0.3"),))]
    client = JsonClient()
    start = time.monotonic()
    await within_budget(lambda limit_s: client.get(fake.url + PATH, timeout_s=limit_s), timeout_s=5, budget_s=10)
    assert 0.3 <= time.monotonic() - start < 3
    await client.close()


async def test_a_waiting_time_beyond_the_budget_ends_the_call_at_once(fake: FakeSglang) -> None:
    fake.instead[PATH] = [Answer(status=503, headers=(("Retry-After", "Wed, 21 Oct 2099 07:28:00 GMT"),))]
    client = JsonClient()
    start = time.monotonic()
    with pytest.raises(EngineError, match="given up after 1 try"):
        await within_budget(lambda limit_s: client.get(fake.url + PATH, timeout_s=limit_s), timeout_s=5, budget_s=10)
    assert time.monotonic() - start < 5
    await client.close()


async def test_tries_end_with_the_budget_and_are_counted() -> None:
    num_tries = 0

    async def attempt(_limit_s: float) -> None:
        nonlocal num_tries
        num_tries += 1
        raise TransientError("busy", retry_after_s=0.05)

    start = time.monotonic()
    with pytest.raises(EngineError, match=r"busy \(given up after \d+ tries"):
        await within_budget(attempt, timeout_s=0.1, budget_s=1.0)
    assert 3 <= num_tries <= 20
    assert time.monotonic() - start < 5


async def test_without_a_budget_there_is_one_try() -> None:
    num_tries = 0

    async def attempt(limit_s: float) -> None:
        nonlocal num_tries
        num_tries += 1
        assert limit_s == pytest.approx(3, abs=0.1)
        raise TransientError("busy")

    with pytest.raises(EngineError, match="after 1 try"):
        await within_budget(attempt, timeout_s=3, budget_s=0)
    assert num_tries == 1


async def test_cancelling_ends_a_call_that_waits(fake: FakeSglang) -> None:
    fake.instead[PATH] = [Answer(is_silent=True)]
    task = asyncio.create_task(_get(fake))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_the_token_is_sent_and_never_shown(fake: FakeSglang, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    secret = "sk-very-secret"
    fake.instead[PATH] = [
        Answer(status=400, body=f'{{"error": "Incorrect API key provided: {secret}"}}'.encode()),
        Answer(status=401, body=secret.encode()),
    ]
    for _ in range(2):
        with pytest.raises(EngineError) as caught:
            await _get(fake, token=secret)
        assert secret not in str(caught.value)
    assert fake.tokens == [f"Bearer {secret}"] * 2
    assert secret not in caplog.text


def test_an_address_is_shown_without_its_password() -> None:
    assert shown("http://user:pw@host:1/v1/x?key=abc") == "http://host:1/v1/x"
    assert shown("http://host:1") == "http://host:1"
