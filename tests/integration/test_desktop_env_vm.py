"""OSWorld's own evaluators on one of our virtual machines give the same rewards as our own graders."""

from pathlib import Path

import pytest
from desktop_env_place import REPOSITORY, find_python
from test_qemu_desktop import MISSING
from test_real_osworld_tasks import SOLUTIONS, read_task

from env_server.driving.download import Downloader
from env_server.driving.guest_driver import GuestDrivers, OwnGraders
from env_server.providers.desktop_env.graders import OSWorldGraders
from env_server.providers.qemu.provider import QemuProvider
from env_server.settings import TaskLimits

pytestmark = [
    pytest.mark.desktop_env,
    pytest.mark.vm,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(MISSING), reason=f"no virtual machines here: {', '.join(MISSING)} missing"),
]


async def test_osworlds_scores_on_a_virtual_machine_equal_our_own(tmp_path: Path, real_data: Path) -> None:
    solution, limits = SOLUTIONS[0], TaskLimits()
    task = read_task(real_data, solution.task_id)
    osworld = OSWorldGraders(python=find_python(), folder=tmp_path)
    provider = QemuProvider(
        images=REPOSITORY / "var/test-images/qemu", screen_size=(1024, 768), accelerator="tcg"
    )  # the image and the saved state of the other tests
    downloader = Downloader(limits)
    try:
        desktop = await provider.start("replica-0")
        drivers = [
            GuestDrivers(limits=limits, downloader=downloader, screen=(1024, 768), graders=graders)
            .plan(task.config)
            .drive(desktop)
            for graders in (OwnGraders(), osworld)
        ]
        await drivers[0].prepare()
        idle = [await driver.evaluate(last_action="DONE") for driver in drivers]
        await desktop.guest.execute(solution.lines[0], shell=True)
        solved = [await driver.evaluate(last_action="DONE") for driver in drivers]
    finally:
        await downloader.close()
        await osworld.close()
        await provider.close()
    assert (idle, solved) == ([0.0, 0.0], [1.0, 1.0])
