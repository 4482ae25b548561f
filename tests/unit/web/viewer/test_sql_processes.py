"""Users' SQL over a real server: slow conditions delay no page, end with their client, and stay within their bounds."""

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator
from contextlib import suppress
from html import unescape
from pathlib import Path
from urllib.parse import quote

import pytest
from raw_http import RawAnswer, answer_to, get, until
from served_viewer import served

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.web.viewer.settings import TOKEN_VARIABLE
from osworld_pipeline.web.viewer.sql_process import MEMORY_LIMIT_BYTES
from osworld_pipeline.web.viewer.sql_processes import MAX_WAITING, NUM_AT_ONCE

ENDLESS = "(SELECT count(*) FROM range(10000000) a, range(10000000) b) > {}"


@pytest.fixture
async def port(sample_state: StateDir) -> AsyncIterator[int]:
    async with served(sample_state) as port:
        yield port


def sql_processes() -> set[int]:
    """The live SQL processes of this test's server."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # a thread or a process that has ended
            for pid in (task / "children").read_text().split():
                if b"viewer.sql_process" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.add(int(pid))
    return found


def memory_of(pid: int | str) -> int:
    """The resident memory, in bytes."""
    return 1024 * int(re.findall(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[0])


def limits_of(pid: int) -> str:
    return Path(f"/proc/{pid}/limits").read_text()


def environment_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


def cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def list_with(condition: str) -> bytes:
    return get(f"/episodes?where={quote(condition)}")


def problem_of(answer: RawAnswer) -> str:
    return unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", "", answer.body.decode())))


async def test_process_is_started_ahead_and_replaced_after_its_answer(port: int) -> None:
    await until(lambda: len(sql_processes()) == 1)
    before = sql_processes()
    assert (await answer_to(port, list_with("seed = 7"))).status == 200
    await until(lambda: len(sql_processes()) == 1)
    assert sql_processes().isdisjoint(before)


async def test_condition_whose_client_leaves_is_killed(port: int) -> None:
    await until(lambda: len(sql_processes()) == 1)
    (pid,) = sql_processes()
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(list_with(ENDLESS.format(1)))
    await until(lambda: cpu_ticks(pid) > 30)
    writer.close()
    await until(lambda: pid not in sql_processes(), limit_s=8)
    assert (await answer_to(port, list_with("seed = 7"))).status == 200, "there is room for another"


async def test_pages_answer_while_many_slow_conditions_are_asked(port: int) -> None:
    asked = [asyncio.create_task(answer_to(port, list_with(ENDLESS.format(n)), limit_s=60)) for n in range(60)]
    await until(lambda: sum(task.done() for task in asked) >= 60 - NUM_AT_ONCE - MAX_WAITING)
    front = await answer_to(port, get("/"))
    refused = [task.result() for task in asked if task.done()]
    assert front.status == 200
    assert len(refused) == 60 - NUM_AT_ONCE - MAX_WAITING
    assert {answer.status for answer in refused} == {503}
    assert "running or waiting: try again later" in problem_of(refused[0])
    for task in asked:
        task.cancel()
    await asyncio.gather(*asked, return_exceptions=True)
    await until(lambda: len(sql_processes()) <= 1, limit_s=10)


async def test_a_condition_that_waits_too_long_for_its_turn_is_answered_with_503(sample_state: StateDir) -> None:
    async with served(sample_state, question_s=0.3) as port:
        answers = await asyncio.gather(*(answer_to(port, list_with(ENDLESS.format(n))) for n in range(12)))
    assert {answer.status for answer in answers} == {200, 503}
    problems = [problem_of(answer) for answer in answers]
    assert all("stopped after 0.3 s" in text or "took 0.3 s" in text for text in problems)


@pytest.mark.parametrize("condition", ["repeat('x', 3e9::BIGINT) <> ''", "len(range(1000000000)) > 1"])
async def test_a_condition_that_takes_too_much_memory_is_answered_with_one_sentence(port: int, condition: str) -> None:
    before = memory_of("self")
    answer = await answer_to(port, list_with(condition), limit_s=60)
    assert answer.status == 200
    assert "the query needs more than 2 GiB of memory: choose facets, or narrow the condition" in problem_of(answer)
    assert memory_of("self") < before + 200 * 1024 * 1024, "the server itself took none of it"


async def test_the_kernel_limits_the_memory_and_file_size_of_the_process(port: int) -> None:
    await until(lambda: len(sql_processes()) == 1)
    (pid,) = sql_processes()
    for name, limit in (("address space", MEMORY_LIMIT_BYTES), ("file size", 0)):
        pattern = rf"Max {name}\s+{limit}\s+{limit}\s"
        await until(lambda pattern=pattern: re.search(pattern, limits_of(pid)) is not None)


async def test_the_sql_process_gets_no_token(sample_state: StateDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "a secret")
    async with served(sample_state):
        await until(lambda: len(sql_processes()) == 1)
        (pid,) = sql_processes()
        assert b"a secret" not in environment_of(pid)


async def test_a_process_that_dies_is_reported_with_one_sentence_and_replaced(port: int) -> None:
    await until(lambda: len(sql_processes()) == 1)
    (pid,) = sql_processes()
    asking = asyncio.create_task(answer_to(port, list_with(ENDLESS.format(1))))
    await until(lambda: cpu_ticks(pid) > 30)
    os.kill(pid, signal.SIGSEGV)
    assert "the query's process died" in problem_of(await asking)
    assert (await answer_to(port, list_with("seed = 7"))).status == 200
