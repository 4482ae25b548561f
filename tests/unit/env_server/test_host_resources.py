"""A sandbox's resources on its host are released step by step, even if one of the steps fails, and again until all are
released. The processes are real; a control group is a folder that cannot be removed while there is a file in it."""

import asyncio
import os
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from env_server.providers.bounds import Group
from env_server.providers.host_resources import MAX_UNFINISHED, EndLimits, HostResources, Releases
from env_server.providers.host_users import HostUsers
from osworld_pipeline.errors import ReplicaError

UID = 1_499_999_999
"""Outside the range of desktops."""


class BrokenClient:
    num_calls = 0

    async def close(self) -> None:
        self.num_calls += 1
        if self.num_calls == 1:
            raise RuntimeError("the connection is in no state to be closed")


def held_of(tmp_path: Path, users: HostUsers, *, stop_limit_s: float = 0.3) -> HostResources:
    """A program that sleeps, in two groups, with a descriptor, a host user and a client whose close fails once."""
    held = HostResources("the desktop replica-0", users, stop_limit_s=stop_limit_s)
    held.uid = users.claim()
    held.descriptors.append(os.open("/dev/null", os.O_RDONLY))
    held.parts.append(BrokenClient())
    folders = tuple(tmp_path / name for name in ("memory", "pids"))
    for folder in folders:
        folder.mkdir()
    held.group = Group(folders)
    with held.stderr_tail.capture() as stderr:
        held.process = subprocess.Popen(["sleep", "600"], stderr=stderr)
    return held


@contextmanager
def silent_no_sooner(held: HostResources) -> Iterator[None]:
    """Keeps the program's standard error open, as a process does that does not end by SIGKILL."""
    assert held.process is not None
    kept = os.open(f"/proc/{held.process.pid}/fd/2", os.O_WRONLY)
    try:
        yield
    finally:
        os.close(kept)


async def until(condition: Callable[[], bool], limit_s: float = 5.0) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110 - the kernel sends no event
            await asyncio.sleep(0.01)


async def test_every_step_of_a_release_is_done_even_if_another_step_fails(tmp_path: Path) -> None:
    users = HostUsers((UID,))
    held = held_of(tmp_path, users)
    (descriptor,) = held.descriptors
    process = held.process
    assert process is not None
    (tmp_path / "memory/left").touch()
    with silent_no_sooner(held):
        left = await held.release()
        assert [name.replace(str(tmp_path), "") for name in left] == [
            "the desktop replica-0 (RuntimeError: the connection is in no state to be closed)",
            f"the desktop replica-0 is still running 0.3 s after SIGKILL (process {process.pid})",
            "the control group /memory of the desktop replica-0",
        ]
        assert process.returncode == -9
        assert not (tmp_path / "pids").exists()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
        with pytest.raises(Exception, match="are used"):
            users.claim()  # as long as one of its processes may be there
    (tmp_path / "memory/left").unlink()
    assert await held.release() == ()
    assert not (tmp_path / "memory").exists()
    assert users.claim() == UID
    users.release(UID)


async def test_what_a_stop_leaves_is_removed_in_the_background(tmp_path: Path) -> None:
    held, releases = held_of(tmp_path, HostUsers(())), Releases(interval_s=0.05)
    with silent_no_sooner(held):
        await releases.release(held)
        await releases.release(held)
        assert (tmp_path / "memory").exists() is False, "groups do not wait for what holds the standard error"
    await until(held.stderr_tail.is_silent.is_set)
    await releases.close()


async def test_a_release_continues_after_its_caller_is_cancelled_and_closing_waits_for_it(tmp_path: Path) -> None:
    held, releases = held_of(tmp_path, HostUsers(()), stop_limit_s=10), Releases(interval_s=0.05)
    with silent_no_sooner(held):
        stopping = asyncio.create_task(releases.release(held))
        await asyncio.sleep(0.05)
        stopping.cancel()
        await asyncio.wait({stopping})
        assert stopping.cancelled()
        closing = asyncio.create_task(releases.close())
        await asyncio.sleep(0.05)
        assert not closing.done()
    await closing
    assert held.group is None


class Stuck:
    """A sandbox that never ends."""

    def __init__(self, what: str, release: Callable[[], Awaitable[None]] | None = None) -> None:
        self.what, self.num_attempts, self._release = what, 0, release

    async def release(self) -> tuple[str, ...]:
        self.num_attempts += 1
        if self._release is not None:
            await self._release()
        return (f"process 4711 of {self.what}",)


async def test_attempts_are_counted_and_what_is_left_after_the_last_is_named_at_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    releases, stuck = Releases(num_attempts=3, interval_s=0.01), Stuck("the desktop replica-0")
    await releases.release(stuck)
    await until(lambda: "not removed in 3 attempts: process 4711 of the desktop replica-0" in caplog.text)
    await asyncio.sleep(0.05)
    assert stuck.num_attempts == 3
    with pytest.raises(ReplicaError, match="could not be removed: process 4711 of the desktop replica-0;"):
        await releases.close()
    assert stuck.num_attempts == 6


async def test_closing_takes_no_longer_than_its_limit() -> None:
    releases, stuck = Releases(EndLimits(all_s=0.05)), Stuck("the desktop replica-0", asyncio.Event().wait)  # type: ignore[arg-type]
    stopping = asyncio.create_task(releases.release(stuck))
    await asyncio.sleep(0)
    async with asyncio.timeout(5):
        with pytest.raises(ReplicaError, match="could not be removed: the desktop replica-0;"):
            await releases.close()
        await stopping


async def test_no_desktop_is_started_while_many_do_not_end() -> None:
    releases = Releases(EndLimits(all_s=0.05), interval_s=60)
    for number in range(MAX_UNFINISHED):
        releases.check_room()
        await releases.release(Stuck(f"the desktop replica-{number}"))
    with pytest.raises(ReplicaError, match=r"no further desktop is started while parts of others remain.* replica-7"):
        releases.check_room()
    with pytest.raises(ReplicaError, match="could not be removed"):
        await releases.close()
