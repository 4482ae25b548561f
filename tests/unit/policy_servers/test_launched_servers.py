"""Policy servers that a recipe launches run during a block, are restarted when they die, and end with their program."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import EngineError, RecipeError
from osworld_pipeline.policy_servers import supervisor
from osworld_pipeline.policy_servers.commands import gpus_of_server, server_commands
from osworld_pipeline.policy_servers.launch import SharedServers, launched_servers
from osworld_pipeline.recipes import Recipe, load_recipe

STUB = Path(__file__).parent / "stub_sglang.py"
LIMIT_S = 30.0


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state folder next to an sglang environment whose Python runs the stub."""
    python = tmp_path / "sglang" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {STUB} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setenv("SGLANG_ENV", str(tmp_path / "sglang"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "model").mkdir()
    return tmp_path


def recipe_with(*settings: str) -> Recipe:
    return load_recipe("smoke", settings=('engine.kind="sglang"', *settings))


def ask(url: str, path: str = "/") -> dict[str, Any]:
    return httpx.get(f"{url}{path}", trust_env=False, timeout=5).json()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not await asyncio.to_thread(holds):  # noqa: ASYNC110 - another process does it
            await asyncio.sleep(0.05)


async def test_servers_run_during_the_block_on_the_gpus_after_those_of_the_trainer(place: Path) -> None:
    recipe = recipe_with("engine.launch.num_servers=2", "engine.launch.gpus_per_server=2", "trainer.num_processes=4")
    async with launched_servers(recipe, StateDir(place / "var"), place / "model") as launched:
        reported = [ask(url) for url in launched.engine.urls]
        assert launched.engine.launch is None
        assert all(is_running(one["pid"]) for one in reported)
    assert [one["gpus"] for one in reported] == ["4,5", "6,7"]
    assert reported[0]["arguments"][-6:-4] == ["--tp-size", "2"]
    assert not any(is_running(one["pid"]) for one in reported)


async def test_the_server_of_a_rank_does_not_get_the_variables_of_the_process_group(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    recipe = recipe_with("engine.launch.num_servers=1")
    async with launched_servers(recipe, StateDir(place / "var"), place / "model") as launched:
        assert ask(launched.engine.urls[0])["world_size"] is None


async def test_a_server_that_dies_is_restarted_at_its_address(place: Path) -> None:
    recipe = recipe_with("engine.launch.num_servers=1")
    async with launched_servers(recipe, StateDir(place / "var"), place / "model") as launched:
        (url,) = launched.engine.urls
        pid = ask(url)["pid"]
        os.kill(pid, signal.SIGKILL)

        def is_back() -> bool:
            try:
                return ask(url)["pid"] != pid
            except httpx.HTTPError:
                return False

        await until(is_back)


async def test_a_server_that_cannot_start_is_an_error_with_the_end_of_its_log_and_stops_the_others(place: Path) -> None:
    (place / "model" / "is-broken").touch()
    with pytest.raises(EngineError, match=r"ended with status 3 .*policy-server-\d.log ends with: CUDA error: out of"):
        async with launched_servers(
            recipe_with("engine.launch.num_servers=2"), StateDir(place / "var"), place / "model"
        ):
            pass


def child_of(pid: int) -> int:
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


async def test_a_server_whose_command_cannot_be_run_is_an_error_at_once(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(place))
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(EngineError, match=r"cannot be run: .*'setpriv'"):
            async with launched_servers(
                recipe_with("engine.launch.num_servers=1"), StateDir(place / "var"), place / "model"
            ):
                pass


PROGRAM = """
import asyncio, sys
from pathlib import Path
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.policy_servers.launch import launched_servers
from osworld_pipeline.recipes import load_recipe
async def main():
    recipe = load_recipe("smoke", settings=('engine.kind="sglang"', "engine.launch.num_servers=2"))
    place = Path(sys.argv[1])
    async with launched_servers(recipe, StateDir(place / "var"), place / "model") as launched:
        print(*launched.engine.urls, flush=True)
        await asyncio.sleep(600)
asyncio.run(main())
"""


@pytest.mark.parametrize("who", ["the program", "the supervisor"])
async def test_servers_end_with_a_killed_program_or_supervisor(place: Path, who: str) -> None:
    program = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, str(place), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert program.stdout is not None
        urls = (await program.stdout.readline()).decode().split()
        pids = [ask(url)["pid"] for url in urls]
        os.kill(program.pid if who == "the program" else child_of(program.pid), signal.SIGKILL)
        await until(lambda: len(pids) == 2 and not any(map(is_running, pids)))
    finally:
        with suppress(ProcessLookupError):
            program.kill()
        await program.wait()


def order_for(place: Path, port: int) -> supervisor.ServerOrder:
    (command,) = server_commands(recipe_with("engine.launch.num_servers=1"), place / "model", ports=[port])
    return supervisor.ServerOrder(
        url=command.url, arguments=command.arguments, environment=command.environment, log=str(place / "log")
    )


async def test_a_server_that_hangs_is_restarted(
    place: Path, monkeypatch: pytest.MonkeyPatch, unused_tcp_port: int, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(supervisor, "PING_S", 0.05)
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 0.0)
    order = order_for(place, unused_tcp_port)
    keeper = asyncio.create_task(supervisor.keep_up(order, start_timeout_s=LIMIT_S))
    reported: list[str] = []

    def has(text: str) -> bool:
        reported.extend(capfd.readouterr())
        return text in "".join(reported)

    await until(lambda: has('"ready"'))
    await asyncio.to_thread(ask, order.url, "/hang")
    await until(lambda: has("did not answer 6 pings in a row; it is restarted in 0 s"))
    keeper.cancel()
    await asyncio.gather(keeper, return_exceptions=True)


async def test_a_server_that_keeps_dying_stays_down(
    place: Path, monkeypatch: pytest.MonkeyPatch, unused_tcp_port: int, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 0.0)
    order = order_for(place, unused_tcp_port)
    keeper = asyncio.create_task(supervisor.keep_up(order, start_timeout_s=LIMIT_S))

    await until(lambda: '"ready"' in capfd.readouterr().out)
    (place / "model" / "is-broken").touch()
    os.kill(ask(order.url)["pid"], signal.SIGKILL)
    async with asyncio.timeout(LIMIT_S):
        await keeper
    assert "it has been restarted 5 times within 30 minutes and stays down" in capfd.readouterr().err


async def test_several_sessions_of_a_program_share_their_servers(place: Path) -> None:
    recipe = recipe_with("engine.launch.num_servers=1")
    async with SharedServers(StateDir(place / "var")) as shared:
        first = await shared.named_in(recipe, place / "model")
        second = await shared.named_in(recipe, place / "other")
        assert first.engine.urls == second.engine.urls
        pid = ask(first.engine.urls[0])["pid"]
    assert not is_running(pid)


@pytest.mark.parametrize(
    ("visible", "gpus"), [(None, ("3",)), ("4,5,6,7", ("7",)), ("GPU-a, GPU-b,GPU-c,GPU-d", ("GPU-d",))]
)
def test_gpus_are_counted_among_the_visible_ones(visible: str | None, gpus: tuple[str, ...]) -> None:
    recipe = recipe_with("engine.launch.num_servers=2", "engine.launch.first_gpu=2")
    assert gpus_of_server(recipe, 1, visible) == gpus


def test_too_few_visible_gpus_are_refused_by_name() -> None:
    recipe = recipe_with("engine.launch.num_servers=2", "trainer.num_processes=4")
    with pytest.raises(
        EngineError, match="policy server 2 on GPU 5, and the number of GPUs in CUDA_VISIBLE_DEVICES is 4"
    ):
        gpus_of_server(recipe, 1, "0,1,2,3")


def test_a_missing_sglang_is_an_error_that_names_the_searched_path(place: Path) -> None:
    recipe = recipe_with("engine.launch.num_servers=1")
    with pytest.raises(EngineError, match=r"there is no sglang at .*/nowhere: install sglang"):
        server_commands(recipe, place / "model", ports=[1], environment={"SGLANG_ENV": str(place / "nowhere")})


def test_adapters_and_a_trained_vision_tower_decide_the_server_s_settings(place: Path) -> None:
    given = {"SGLANG_ENV": str(place / "sglang")}
    lora = recipe_with("engine.launch.num_servers=1", "trainer.lora.rank=8", "trainer.train_vision=false")
    (command,) = server_commands(lora, place / "model", ports=[1], environment=given)
    adapters = command.arguments[command.arguments.index("--enable-lora") :]
    assert adapters[:5] == (
        "--enable-lora",
        "--max-lora-rank",
        "8",
        "--lora-target-modules",
        "q_proj",
    )
    assert "SGLANG_VLM_CACHE_SIZE_MB" not in command.environment
    vision = recipe_with("engine.launch.num_servers=1", "trainer.train_vision=true")
    (command,) = server_commands(vision, place / "model", ports=[1], environment=given)
    assert command.environment["SGLANG_VLM_CACHE_SIZE_MB"] == "0"
    assert "--enable-lora" not in command.arguments


@pytest.mark.parametrize(("dtype", "is_wide"), [("bfloat16", True), ("float32", False)])
def test_a_bfloat16_server_computes_its_logits_in_float32(place: Path, dtype: str, is_wide: bool) -> None:
    recipe = load_recipe("qwen3vl_4b_node", settings=[f'model.dtype="{dtype}"'])
    commands = server_commands(recipe, place / "model", ports=[1], environment={"SGLANG_ENV": str(place / "sglang")})
    (arguments,) = [command.arguments for command in commands]
    assert arguments[arguments.index("--dtype") + 1] == dtype
    assert ("--enable-fp32-lm-head" in arguments) == is_wide


@pytest.mark.parametrize("settings", [('engine.kind="transformers"',), ('engine.urls=["http://gpu:30000"]',)])
def test_launch_with_an_engine_other_than_sglang_or_with_urls_is_refused(settings: tuple[str, ...]) -> None:
    with pytest.raises(RecipeError, match=r"engine.launch starts sglang servers"):
        recipe_with("engine.launch.num_servers=1", *settings)
