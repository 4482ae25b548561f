"""A desktop that does not end when it is killed: its slot gets another one, what is left of it is removed as soon as
that is possible, and what is left at the very end is named. The kernel's freezer makes such a desktop."""

import asyncio
import os
import time
from collections.abc import AsyncIterator

import pytest
from env_server_process import desktops_below
from freezer import frozen

from env_server.providers.host_resources import EndLimits
from env_server.providers.local.provider import LocalProvider
from osworld_pipeline.errors import ReplicaError

pytestmark = pytest.mark.desktop

LIMITS = EndLimits(one_s=0.5, all_s=1.0)


@pytest.fixture
async def provider(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalProvider]:
    images = tmp_path_factory.getbasetemp() / "images-of-leftovers"
    provider = LocalProvider(images=images, screen_size=(640, 480), end_limits=LIMITS)
    try:
        yield provider
    finally:
        await provider.close()


def held_here() -> dict[str, object]:
    """What this process holds, which runs the provider."""
    # Unlike a glob, a walk continues where other desktops' groups vanish.
    folders = [name for _, names, _ in os.walk("/sys/fs/cgroup") for name in names]
    return {
        "desktops": len(desktops_below(os.getpid())),
        "groups": len([name for name in folders if name.startswith(f"osworld-desktop-{os.getpid()}-")]),
        "open files": len(os.listdir("/proc/self/fd")),
    }


async def until_same(before: dict[str, object], limit_s: float = 10.0) -> None:
    deadline = time.monotonic() + limit_s
    while (now := held_here()) != before:
        assert time.monotonic() < deadline, f"{before} and then {now}"
        await asyncio.sleep(0.05)


async def test_a_desktop_that_outlives_its_stop_is_replaced_at_once_and_removed_later(provider: LocalProvider) -> None:
    desktop = await provider.start("replica-0")
    before = held_here()
    (bubblewrap,) = desktops_below(os.getpid())
    with frozen(bubblewrap):
        await desktop.reset()
        assert await desktop.guest.platform() == "Linux"
        assert len(desktops_below(os.getpid())) == 2
    await until_same(before)


async def test_a_control_group_with_a_process_in_it_is_removed_once_that_has_ended(provider: LocalProvider) -> None:
    desktop = await provider.start("replica-0")
    before = held_here()
    group = desktop.group
    if group is None:
        pytest.skip(f"this machine: {provider.details}")
    stranger = await asyncio.create_subprocess_exec("sleep", "600")
    try:
        for folder in group.folders:
            (folder / "cgroup.procs").write_text(str(stranger.pid))
        await desktop.reset()
        assert all(folder.exists() for folder in group.folders)
    finally:
        stranger.kill()
        await stranger.wait()
    await until_same(before)


async def test_closing_names_a_desktop_that_does_not_end_and_removes_all_others(provider: LocalProvider) -> None:
    before = held_here()
    stuck, other = [await provider.start(f"replica-{number}") for number in range(2)]
    bubblewrap, _ = sorted(desktops_below(os.getpid()))
    groups = [] if stuck.group is None else [str(folder) for folder in stuck.group.folders]
    others = () if other.group is None else other.group.folders
    with frozen(bubblewrap):
        with pytest.raises(ReplicaError) as caught:
            await provider.close()
        assert f"the desktop replica-0 is still running 0.5 s after SIGKILL (process {bubblewrap})" in str(caught.value)
        assert [group for group in groups if group not in str(caught.value)] == []
        assert "replica-1" not in str(caught.value)
        assert desktops_below(os.getpid()) == [bubblewrap]
        assert not any(folder.exists() for folder in others)
    await provider.close()
    await until_same(before)
