"""The reference gateway: quota, lifetimes, sessions, and calls that happen once."""

import asyncio
from contextlib import suppress

import httpx
import pytest
from fake_desktops import until
from gateway_doubles import URL, Gateway, gateway
from hypothesis import given
from hypothesis import strategies as st

from env_server.gateway_server.faults import Faults, FaultShares
from env_server.gateway_server.main import main
from env_server.gateway_server.sandboxes import OnceOnly


async def start(there: Gateway, name: str = "") -> dict[str, str]:
    answer = await there.http.post("/v1/sandboxes", headers={"Idempotency-Key": name} if name else {})
    assert answer.status_code == 201, answer.text
    return answer.json()


async def ask(
    there: Gateway, sandbox: dict[str, str], path: str, *, name: str = "", **options: object
) -> httpx.Response:
    headers = {"X-Sandbox-Session": sandbox["session_id"]} | ({"Idempotency-Key": name} if name else {})
    method = "POST" if options else "GET"
    return await there.http.request(
        method, f"/v1/sandboxes/{sandbox['sandbox_id']}/guest{path}", headers=headers, **options
    )


async def test_over_the_quota_the_answer_is_429_with_the_time_to_retry() -> None:
    async with gateway(quota=1, retry_after_s=2.5) as there:
        first = await start(there)
        refused = await there.http.post("/v1/sandboxes")
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "3")
        headers = {"X-Sandbox-Session": first["session_id"]}
        assert (await there.http.delete(f"/v1/sandboxes/{first['sandbox_id']}", headers=headers)).status_code == 204
        await start(there)
        assert there.num_running == 1


async def test_without_the_token_only_the_probe_answers() -> None:
    async with gateway() as there, httpx.AsyncClient(transport=there.transport, base_url=URL) as stranger:
        assert (await stranger.post("/v1/sandboxes")).status_code == 401
        assert (await stranger.get("/healthz")).json()["taken"] == 0


async def test_a_start_sent_twice_gives_one_sandbox() -> None:
    async with gateway() as there:
        assert await start(there, "r") == await start(there, "r")
        assert len(there.desktops.desktops) == 1


async def test_a_refused_start_may_be_sent_again_under_its_name() -> None:
    async with gateway(quota=1) as there:
        first = await start(there)
        assert (await there.http.post("/v1/sandboxes", headers={"Idempotency-Key": "r"})).status_code == 429
        headers = {"X-Sandbox-Session": first["session_id"]}
        await there.http.delete(f"/v1/sandboxes/{first['sandbox_id']}", headers=headers)
        await start(there, "r")


async def test_a_named_call_happens_once_even_if_it_is_sent_several_times_at_once() -> None:
    async with gateway() as there:
        sandbox = await start(there)
        there.last.act_gate = asyncio.Event()
        asking = [asyncio.create_task(ask(there, sandbox, "/act", name="r", json={"calls": []})) for _ in range(3)]
        await asyncio.sleep(0.02)
        asking[0].cancel()
        there.last.act_gate.set()
        answers = await asyncio.gather(*asking, return_exceptions=True)
        again = await ask(there, sandbox, "/act", name="r", json={"calls": []})
        assert [a.status_code for a in [*answers[1:], again] if isinstance(a, httpx.Response)] == [200] * 3
        assert len(there.last.acts) == 1
        await ask(there, sandbox, "/act", name="another", json={"calls": []})
        assert len(there.last.acts) == 2


async def test_the_guests_own_errors_are_distinguished_from_the_gateways() -> None:
    async with gateway() as there:
        sandbox = await start(there)
        answer = await ask(there, sandbox, "/nothing", json={})
        assert (answer.status_code, answer.headers["x-answered-by"]) == (404, "guest")
        there.last.alive = False
        answer = await ask(there, sandbox, "/screenshot")
        assert answer.status_code == 410
        assert "x-answered-by" not in answer.headers


async def test_a_session_is_valid_only_for_its_holder_and_a_renewal_does_not_affect_running_calls() -> None:
    async with gateway() as there:
        sandbox = await start(there)
        assert (await ask(there, sandbox | {"session_id": "guessed"}, "/platform")).status_code == 410
        path, headers = f"/v1/sandboxes/{sandbox['sandbox_id']}/session", {"X-Sandbox-Session": sandbox["session_id"]}
        # Two renewals whose answers were lost: the client has only the first session.
        for _ in range(2):
            renewed = (await there.http.post(path, headers=headers)).json()
        assert renewed["session_id"] != sandbox["session_id"]
        assert (await ask(there, sandbox, "/platform")).status_code == 200
        assert (await ask(there, renewed, "/platform")).status_code == 200


async def test_an_unused_sandbox_ends_and_frees_its_quota() -> None:
    async with gateway(quota=1, lifetime_s=0.08) as there:
        await start(there)
        await until(lambda: there.num_running == 0)
        await start(there)
        assert there.table.num_reaped == 1


async def test_a_sandbox_with_a_running_call_is_never_reaped() -> None:
    async with gateway(quota=1, lifetime_s=0.05) as there:
        sandbox = await start(there)
        there.last.act_gate = asyncio.Event()
        asking = asyncio.create_task(ask(there, sandbox, "/act", json={"calls": []}))
        await asyncio.sleep(0.3)
        assert there.num_running == 1
        there.last.act_gate.set()
        assert (await asking).status_code == 200


async def test_a_desktop_that_does_not_come_up_takes_no_quota() -> None:
    from osworld_pipeline.errors import ReplicaError

    async with gateway(quota=1) as there:
        there.desktops.failures.append(ReplicaError("no luck"))
        assert (await there.http.post("/v1/sandboxes")).status_code == 502
        await start(there)


async def test_no_sandbox_is_left_when_the_gateway_ends() -> None:
    async with gateway(quota=3) as there:
        await start(there)
        await start(there)
    assert there.num_running == 0


async def test_faults_come_in_their_shares_and_calls_with_lost_answers_have_happened() -> None:
    async with gateway(faults="fail=0.2,lose=0.2,busy=0.2") as there:
        statuses = [(await there.http.post("/v1/sandboxes")).status_code for _ in range(40)]
        assert 429 in statuses
        made = there.faults.num_made
        assert min(made["fail"], made["lose"], made["busy"]) >= 2
        assert there.table.num_started == 2  # the quota, reached by starts whose answers may have been lost


@given(st.text(max_size=40))
def test_any_text_is_faults_or_refused(text: str) -> None:
    with suppress(ValueError):
        shares = FaultShares.read(text)
        assert 0 <= shares.fail + shares.lose + shares.busy <= 1


def test_faults_are_read() -> None:
    assert FaultShares.read("fail=0.1, slow=0.2:1.5") == FaultShares(fail=0.1, slow=0.2, slow_s=1.5)


@pytest.mark.parametrize("text", ["fail=2", "break=0.1", "fail=0.6,lose=0.6", "fail=0.1:3", "slow=0.1:1e9"])
def test_wrong_faults_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        FaultShares.read(text)


async def test_faults_of_one_seed_are_the_same() -> None:
    drawn = [[await faults.draw() for _ in range(30)] for faults in
             (Faults(FaultShares(fail=0.3, busy=0.3), seed=7) for _ in range(2))]  # fmt: skip
    assert drawn[0] == drawn[1]


async def test_work_that_failed_is_done_again() -> None:
    once: OnceOnly[int] = OnceOnly(2)
    results: list[Exception | int] = [ValueError("first"), 2]

    async def work() -> int:
        result = results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    with pytest.raises(ValueError, match="first"):
        await once.do("a", work)
    assert [await once.do("a", work), await once.do("a", work)] == [2, 2]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--host", "0.0.0.0"], "without a token: set OSWORLD_SANDBOX_TOKEN"),
        (["--tls-cert", "x.pem"], "HTTPS needs both"),
        (["--screen-size", "big"], "screen_width"),
    ],
)
def test_unsafe_or_wrong_arguments_are_reported_and_start_nothing(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OSWORLD_SANDBOX_TOKEN", raising=False)
    assert main(["--port", "0", *arguments]) == 1
    assert sentence in capsys.readouterr().err
