"""The name that a program has at env servers, and what it does with episodes that are left over under it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from osworld_pipeline.domain.digest import digest_json
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import EnvServerError, StoreError
from osworld_pipeline.rollout.env_client import EnvClient
from osworld_pipeline.runs.rollouts.env_servers import client_name

HOLDER = """
import sys
from pathlib import Path
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.runs.rollouts.env_servers import client_name
with client_name(StateDir(Path(sys.argv[1])), "sft-1") as (name, is_sole):
    print(name, is_sole, flush=True)
    sys.stdin.read()
"""


def test_a_purpose_has_the_same_name_each_time_and_leaves_no_lock(tmp_path: Path) -> None:
    with client_name(StateDir(tmp_path), "sft-1") as first:
        pass
    with client_name(StateDir(tmp_path), "sft-1") as second:
        assert second == first == (first[0], True)
    assert first[0].startswith("sft-1@")
    assert [path.name for path in (tmp_path / "clients").glob("*.lock")] == ["state-id.lock"]


def test_purposes_states_and_copies_of_a_state_have_names_of_their_own(tmp_path: Path) -> None:
    one, other, copied = (StateDir(tmp_path / name) for name in ("one", "other", "copied"))
    with client_name(one, "sft-1") as (first, _), client_name(one, "sft-2") as (second, _):
        copied.clients.mkdir(parents=True)
        (copied.clients / "state-id").write_bytes((one.clients / "state-id").read_bytes())
        with client_name(other, "sft-1") as (third, _), client_name(copied, "sft-1") as (fourth, _):
            assert len({first, second, third, fourth}) == 4


def test_a_program_gets_a_name_of_its_own_while_its_name_is_taken_until_the_holder_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        name, is_sole = holder.stdout.readline().split()
        assert is_sole == "True"
        with client_name(StateDir(tmp_path), "sft-1") as (mine, am_sole):
            assert (mine != name, am_sole) == (True, False)
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait(10)
    with client_name(StateDir(tmp_path), "sft-1") as again:
        assert again == (name, True)


def test_a_name_that_cannot_be_held_is_one_clear_error(tmp_path: Path) -> None:
    lock = tmp_path / "clients" / f"{digest_json('sft-1')[:16]}.lock"
    lock.mkdir(parents=True)
    with pytest.raises(StoreError, match=lock.name), client_name(StateDir(tmp_path), "sft-1"):
        pass


async def test_only_episodes_left_over_under_the_clients_own_name_are_closed() -> None:
    closed: list[tuple[str, bytes]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/close":
            closed.append((str(request.url.host), request.content))
            return httpx.Response(200, json={})
        if request.url.host == "foreign":
            return httpx.Response(404, json={"detail": "Not Found"})
        names = {"e1": "sft-1@s", "e2": "sft-1@other", "e3": "", "e4": "sft-1@s"}
        return httpx.Response(
            200, json={"episodes": [{"episode_id": key, "client_id": name} for key, name in names.items()]}
        )

    urls = "http://ours,http://foreign"
    async with EnvClient(urls, client_id="sft-1@s", transport=httpx.MockTransport(answer)) as client:
        assert await client.close_left_over() == 2
    assert closed == [("ours", b'{"episode_id":"e1"}'), ("ours", b'{"episode_id":"e4"}')]


async def test_a_run_without_a_server_that_answers_ends_before_it_starts() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    async with EnvClient("http://gone:1", client_id="c", transport=httpx.MockTransport(refuse)) as client:
        with pytest.raises(EnvServerError, match="http://gone:1"):
            await client.connect()
