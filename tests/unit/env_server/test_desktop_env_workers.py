"""Real workers over a stand-in for desktop-env: what they answer, how long they may take, and what is left of them."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from desktop_env_doubles import fake_install, task_of

from env_server.driving.driver import EpisodeDriver, View
from env_server.evaluators.episode_cache import EpisodeCache
from env_server.guest_client import GuestClient
from env_server.providers.desktop_env.driver import DesktopEnvDrivers
from env_server.providers.desktop_env.graders import OSWorldGraders
from env_server.providers.desktop_env.install import DesktopEnvInstall
from env_server.providers.desktop_env.provider import DesktopEnvDesktop, DesktopEnvProvider
from env_server.providers.desktop_env.worker.processes import below, children_of
from env_server.providers.desktop_env.workers import WorkerSilentError
from env_server.settings import TaskLimits
from osworld_pipeline.domain.task import Task
from osworld_pipeline.errors import ActionParseError, DependencyError, EvaluatorError, ReplicaError, SetupError

INSTALL = fake_install()


@pytest.fixture
async def provider(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[DesktopEnvProvider]:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("ENV_SERVER_TOKEN", "a secret")
    provider = DesktopEnvProvider(python=INSTALL.python, install=INSTALL, folder=tmp_path / "state")
    yield provider
    await provider.close()
    assert [name for name in os.listdir(tmp_path) if name.startswith("desktop-env-")] == []


@pytest.fixture
async def desktop(provider: DesktopEnvProvider) -> DesktopEnvDesktop:
    return await provider.start("r0")


def drive(desktop: DesktopEnvDesktop, task: dict | None = None, **limits: float) -> EpisodeDriver:
    drivers = DesktopEnvDrivers(python=INSTALL.python, install=INSTALL, limits=TaskLimits(**limits))
    return drivers.plan(task or task_of()).drive(desktop)


def read(path: str) -> bytes:
    return Path(path).read_bytes()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - the kernel sends no event
            await asyncio.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def test_episode_runs_on_desktop_envs_own_loop(desktop: DesktopEnvDesktop) -> None:
    expected = ["pyautogui.click(1, 2); time.sleep(0)", "DONE"]
    driver = drive(desktop, task_of(result={"type": "actions"}, wanted=expected))
    await driver.prepare()
    assert await driver.evaluate(last_action=None) == 0.0
    await driver.act("import pyautogui\npyautogui.click(1, 2)  # there\ntime.sleep(0)", pause_s=0, settle="fixed")
    await driver.act("DONE", pause_s=0, settle="fixed")
    seen = await driver.observe(View(image_format="jpeg", with_accessibility_tree=True, with_terminal=True))
    assert (seen.image_format, seen.accessibility_tree, seen.terminal) == ("jpeg", "<tree/>", "$")
    assert seen.screenshot.startswith(b"\xff\xd8")
    plain = await driver.observe(View())
    assert (plain.image_format, plain.accessibility_tree, plain.terminal) == ("png", None, None)
    with pytest.raises(ActionParseError):
        await driver.act("import os; os.system('x')", pause_s=0, settle="fixed")
    assert await driver.evaluate(last_action="DONE") == 1.0


async def test_adaptive_pause_is_over_when_desktop_envs_screenshots_are_calm(desktop: DesktopEnvDesktop) -> None:
    driver = drive(desktop)
    await driver.prepare()
    start = time.monotonic()
    await driver.act("pyautogui.click(1, 2)", pause_s=6.0, settle="adaptive")
    assert 3.0 <= time.monotonic() - start < 5.8


async def test_reset_takes_a_fresh_vm_and_finds_its_new_address(desktop: DesktopEnvDesktop) -> None:
    driver, address, vm = drive(desktop), desktop.guest.address, below(desktop.worker.pid)
    await driver.prepare()
    await desktop.reset()
    assert desktop.guest.address != address
    assert await desktop.guest.platform() == "Linux"
    assert len(below(desktop.worker.pid)) == len(vm) == 1
    assert not vm & below(desktop.worker.pid)


async def test_task_may_contain_the_content_of_its_uploads(desktop: DesktopEnvDesktop) -> None:
    files = [{"path": "/home/user/a", "content": "from the task"}]
    config = [{"type": "upload_file", "parameters": {"files": files}}]
    driver = drive(desktop, task_of("is_uploaded", wanted="from the task", config=config))
    await driver.prepare()
    assert await driver.evaluate(last_action=None) == 1.0


async def test_set_up_that_fails_is_reported_and_the_next_reset_gives_a_fresh_vm(desktop: DesktopEnvDesktop) -> None:
    config = [{"type": "execute", "parameters": {"command": "make it so"}}]
    address = desktop.guest.address
    with pytest.raises(SetupError, match="Setup step 1 failed: make it so"):
        await drive(desktop, task_of(config=config)).prepare()
    await desktop.reset()
    assert desktop.guest.address != address


async def test_evaluator_that_crashes_gives_no_reward(desktop: DesktopEnvDesktop) -> None:
    driver = drive(desktop, task_of("crash"))
    await driver.prepare()
    with pytest.raises(EvaluatorError, match="KeyError: 'nothing there'"):
        await driver.evaluate(last_action=None)
    assert desktop.is_alive()


async def test_score_above_1_gives_no_reward(desktop: DesktopEnvDesktop) -> None:
    driver = drive(desktop, task_of("too_much"))
    await driver.prepare()
    with pytest.raises(EvaluatorError, match="returned 7"):
        await driver.evaluate(last_action=None)


async def test_guest_that_is_lost_during_grading_is_not_a_zero(desktop: DesktopEnvDesktop) -> None:
    """OSWorld's getter logs the error and returns None, which its metric scores 0."""
    driver = drive(desktop, task_of(result={"type": "vm_file", "path": "gone"}))
    await driver.prepare()
    with pytest.raises(ReplicaError, match="did not answer GET /file/gone"):
        await driver.evaluate(last_action=None)


async def test_action_that_the_guest_did_not_carry_out_is_a_fault(desktop: DesktopEnvDesktop) -> None:
    driver = drive(desktop)
    await driver.prepare()
    with pytest.raises(ReplicaError, match="did not execute"):
        await driver.act("pyautogui.sleep(0.99999)", pause_s=0, settle="fixed")
    await driver.act("pyautogui.press('pause')", pause_s=0, settle="fixed")
    with pytest.raises(ReplicaError, match="no screenshot"):
        await driver.observe(View())


async def test_silent_worker_is_ended_with_all_its_child_processes(desktop: DesktopEnvDesktop) -> None:
    worker, vm = desktop.worker, below(desktop.worker.pid)
    driver = drive(desktop, task_of("hang"), evaluate_timeout_s=0.2)
    await driver.prepare()
    with pytest.raises(EvaluatorError, match=r"grading task t1 took more than 0\.2 s"):
        await driver.evaluate(last_action=None)
    assert not desktop.is_alive()
    with pytest.raises(ReplicaError, match="did not answer 'evaluate'"):
        await driver.observe(View())
    await desktop.stop()
    assert not any(map(is_running, {worker.pid, *vm}))
    assert not worker.folder.exists()


async def test_long_set_up_is_given_up(desktop: DesktopEnvDesktop) -> None:
    config = [{"type": "sleep", "parameters": {"seconds": 60}}]
    with pytest.raises(WorkerSilentError, match=r"'prepare' within 0\.2 s"):
        await drive(desktop, task_of(config=config), setup_timeout_s=0.2).prepare()


async def test_worker_that_ignores_everything_is_killed(
    desktop: DesktopEnvDesktop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("env_server.providers.desktop_env.workers.CLOSE_LIMIT_S", -1.8)
    worker, vm = desktop.worker, below(desktop.worker.pid)
    os.kill(worker.pid, signal.SIGSTOP)
    await desktop.stop()
    assert not any(map(is_running, {worker.pid, *vm}))
    assert not worker.folder.exists()


async def test_worker_that_dies_is_a_replica_error_and_leaves_nothing(provider: DesktopEnvProvider) -> None:
    desktop, other = await provider.start("r0"), await provider.start("r1")
    vm = below(desktop.worker.pid)
    os.kill(desktop.worker.pid, signal.SIGKILL)
    await until(lambda: not desktop.is_alive())
    with pytest.raises(ReplicaError, match="the worker of r0 died"):
        await desktop.reset()
    await desktop.stop()
    await until(lambda: not any(map(is_running, vm)))
    await other.reset()


async def test_evaluator_that_ends_its_process_is_a_fault(desktop: DesktopEnvDesktop) -> None:
    driver = drive(desktop, task_of("die"))
    await driver.prepare()
    with pytest.raises(ReplicaError, match="died during 'evaluate'"):
        await driver.evaluate(last_action=None)


async def test_launcher_that_dies_is_replaced(provider: DesktopEnvProvider) -> None:
    others = set(children_of(os.getpid()))
    first = await provider.start("r0")
    (launcher,) = set(children_of(os.getpid())) - others
    os.kill(launcher, signal.SIGKILL)
    await until(lambda: not first.is_alive())
    second = await provider.start("r0")
    assert second.is_alive()


async def test_cancelled_call_does_not_affect_the_next_call(desktop: DesktopEnvDesktop) -> None:
    config = [{"type": "sleep", "parameters": {"seconds": 0.3}}]
    preparing = asyncio.create_task(drive(desktop, task_of(config=config)).prepare())
    await asyncio.sleep(0.1)
    preparing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await preparing
    assert (await drive(desktop).observe(View())).image_format == "png"


async def test_token_is_not_in_the_environment_of_third_party_programs(desktop: DesktopEnvDesktop) -> None:
    environment = read(f"/proc/{desktop.worker.pid}/environ")
    assert b"TMPDIR=" in environment
    assert b"a secret" not in environment


@pytest.mark.parametrize("place", ["file", "module"])
async def test_user_may_supply_another_provider(tmp_path: Path, place: str) -> None:
    (tmp_path / "mine.py").write_text(
        "from desktop_env.desktop_env import _Provider\n"
        "def create(region, options):\n"
        "    open(options['reported'], 'w').write(region)\n"
        "    return None, _Provider()\n"
    )
    install = DesktopEnvInstall(**{**vars(INSTALL), "search_path": (*INSTALL.search_path, tmp_path)})
    provider = DesktopEnvProvider(
        python=install.python,
        install=install,
        folder=tmp_path,
        region="here",
        plugin="mine:create" if place == "module" else f"{tmp_path}/mine.py:create",
        plugin_options={"reported": str(tmp_path / "reported")},
    )
    try:
        desktop = await provider.start("r0")
        assert await desktop.guest.platform() == "Linux"
    finally:
        await provider.close()
    assert read(str(tmp_path / "reported")) == b"here"


async def test_vm_that_does_not_start_is_reported(tmp_path: Path) -> None:
    provider = DesktopEnvProvider(python=INSTALL.python, install=INSTALL, folder=tmp_path, region="nowhere")
    try:
        with pytest.raises(ReplicaError, match="r0 did not start: desktop-env: ValueError: no such region"):
            await provider.start("r0")
    finally:
        await provider.close()


async def test_desktop_env_that_does_not_load_is_reported(tmp_path: Path) -> None:
    package = tmp_path / "modules" / "desktop_env"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "desktop_env.py").write_text("import no_such_module")
    broken = DesktopEnvInstall(**{**vars(INSTALL), "search_path": (package.parent,)})
    provider = DesktopEnvProvider(python=broken.python, install=broken, folder=tmp_path)
    try:
        with pytest.raises(DependencyError, match=r"does not load; its output: ModuleNotFoundError.*no_such_module"):
            await provider.start("r0")
    finally:
        await provider.close()


def test_killed_server_leaves_nothing(tmp_path: Path) -> None:
    program = textwrap.dedent(
        """
        import asyncio, json
        from pathlib import Path
        from desktop_env_doubles import fake_install
        from env_server.providers.desktop_env.provider import DesktopEnvProvider
        from env_server.providers.desktop_env.worker.processes import below, children_of
        import os

        async def main():
            install = fake_install()
            provider = DesktopEnvProvider(python=install.python, install=install, folder=Path("state"))
            await provider.start("r0")
            print(json.dumps(sorted(below(os.getpid()))), flush=True)
            await asyncio.sleep(60)

        asyncio.run(main())
        """
    )
    (tmp_path / "t").mkdir()
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(Path(__file__).parent), "TMPDIR": str(tmp_path / "t")}
    server = subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path, env=environment, stdout=subprocess.PIPE)
    assert server.stdout is not None
    try:
        processes = json.loads(server.stdout.readline())
        assert len(processes) == 3  # launcher, worker, virtual machine
    finally:
        server.kill()
        server.wait()
        server.stdout.close()
    asyncio.run(until(lambda: not any(map(is_running, processes)) and not os.listdir(tmp_path / "t")))


# OSWorld's evaluators on a desktop that is not desktop-env's


@pytest.fixture
async def graders(tmp_path: Path) -> AsyncIterator[OSWorldGraders]:
    graders = OSWorldGraders(python=INSTALL.python, install=INSTALL, folder=tmp_path)
    yield graders
    await graders.close()


async def grade(graders: OSWorldGraders, guest: GuestClient, task: dict, last_action: str | None = None) -> float:
    cache = EpisodeCache()
    cache.put("said.txt", b"right")
    return await graders.read(Task.from_config(task)).grade(guest, cache, last_action=last_action)


async def test_grader_sees_the_guest_the_kept_files_and_the_last_action(
    graders: OSWorldGraders, desktop: DesktopEnvDesktop
) -> None:
    kept, seen = {"type": "cache_file", "path": "said.txt"}, {"type": "vm_file", "path": "there"}
    assert await grade(graders, desktop.guest, task_of(result=kept)) == 1.0
    assert await grade(graders, desktop.guest, task_of(result=seen, wanted="Linux")) == 1.0
    assert await grade(graders, desktop.guest, task_of("infeasible"), last_action="FAIL") == 1.0
    assert await grade(graders, desktop.guest, task_of("infeasible"), last_action="DONE") == 0.0
    assert graders.version == INSTALL.name


@pytest.mark.parametrize(("func", "sentence"), [("crash", "KeyError"), ("die", "was interrupted")])
async def test_grader_that_crashes_gives_no_reward(
    graders: OSWorldGraders, desktop: DesktopEnvDesktop, func: str, sentence: str
) -> None:
    with pytest.raises(EvaluatorError, match=sentence):
        await grade(graders, desktop.guest, task_of(func))


async def test_grader_whose_guest_is_lost_gives_no_reward(graders: OSWorldGraders, desktop: DesktopEnvDesktop) -> None:
    with pytest.raises(ReplicaError):
        await grade(graders, desktop.guest, task_of(result={"type": "vm_file", "path": "gone"}))


async def test_cancelled_grading_ends_its_process(graders: OSWorldGraders, desktop: DesktopEnvDesktop) -> None:
    # The first grading starts the process from which the others are forked.
    with pytest.raises(EvaluatorError):
        await grade(graders, desktop.guest, task_of("crash"))
    before = below(os.getpid())
    grading = asyncio.create_task(grade(graders, desktop.guest, task_of("hang")))
    start = time.monotonic()

    def graders_alive() -> set[int]:
        return {pid for pid in below(os.getpid()) - before - below(desktop.worker.pid) if is_running(pid)}

    await until(lambda: bool(graders_alive()))
    grading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await grading
    await until(lambda: not graders_alive())
    assert time.monotonic() - start < 10
