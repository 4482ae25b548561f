"""The command line of a machine, the digests that name its saved states, and the choice of an accelerator."""

import itertools
import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from env_server.providers.qemu.accelerator import choose_accelerator
from env_server.providers.qemu.command import (
    Attachments,
    DirectBoot,
    Firmware,
    MachineSpec,
    qemu_arguments,
    video_memory_mb,
)
from env_server.providers.qemu.images import ForeignImage
from env_server.providers.qemu.provider import QemuProvider
from env_server.providers.qemu.saved_state import state_digest
from osworld_pipeline.errors import DependencyError

SPEC = MachineSpec(
    screen_size=(1280, 720),
    memory_mb=1024,
    num_cpus=1,
    accelerator="tcg",
    disks=(Path("/images/gold.qcow2"), Path("/images/base.qcow2")),
    boot=DirectBoot(kernel=Path("/images/vmlinuz"), initrd=Path("/images/initrd"), command_line="root=/dev/vda"),
)
ATTACHED = Attachments(memory_fd=10, overlay_fd=11, qmp_fd=12, wake_fd=13, shares_ram=False)


def value_of(arguments: list[str], option: str, containing: str = "") -> str:
    found = [value for name, value in itertools.pairwise(arguments) if name == option and containing in value]
    assert len(found) == 1, (option, found)
    return found[0]


def disk_of(arguments: list[str]) -> dict[str, Any]:
    return json.loads(value_of(arguments, "-blockdev", '"disk"'))


def test_a_restored_machine_maps_its_memory_copy_on_write() -> None:
    ram = json.loads(value_of(qemu_arguments(SPEC, ATTACHED), "-object"))
    assert (ram["share"], ram["mem-path"], ram["size"]) == (False, "/proc/self/fd/10", 1 << 30)
    shared = qemu_arguments(SPEC, replace(ATTACHED, shares_ram=True))
    assert json.loads(value_of(shared, "-object"))["share"] is True


def test_only_the_overlay_is_written_to() -> None:
    disk = disk_of(qemu_arguments(SPEC, ATTACHED))
    assert disk["file"]["filename"] == "/dev/fdset/1"
    assert "read-only" not in disk
    gold = disk["backing"]
    assert (gold["read-only"], gold["file"]["filename"]) == (True, "/images/gold.qcow2")
    base = gold["backing"]
    assert (base["read-only"], base["file"]["filename"]) == (True, "/images/base.qcow2")


def test_the_network_is_closed_unless_it_is_opened() -> None:
    closed = value_of(qemu_arguments(SPEC, ATTACHED), "-netdev")
    assert "restrict=on" in closed
    assert "hostfwd=tcp:127.0.0.1:5000-:5000" in closed
    opened = value_of(qemu_arguments(SPEC, replace(ATTACHED, open_network=True)), "-netdev")
    assert "restrict=off" in opened


def test_uefi_gets_a_copy_of_its_variables() -> None:
    firmware = Firmware(code=Path("/fw/code.fd"), variables=Path("/fw/vars.fd"))
    spec = replace(SPEC, boot=None, firmware=firmware)
    arguments = qemu_arguments(spec, replace(ATTACHED, variables_fd=14))
    assert json.loads(value_of(arguments, "-blockdev", '"code"'))["read-only"] is True
    assert json.loads(value_of(arguments, "-blockdev", '"variables"'))["file"]["filename"] == "/dev/fdset/2"
    assert "fd=14,set=2" in arguments
    assert "-kernel" not in arguments


@pytest.mark.parametrize(("size", "megabytes"), [((1280, 720), 16), ((1920, 1080), 16), ((2560, 1440), 32)])
def test_video_memory_holds_two_screens(size: tuple[int, int], megabytes: int) -> None:
    assert video_memory_mb(*size) == megabytes


def test_a_state_is_named_by_all_that_it_depends_on() -> None:
    def digest(spec: MachineSpec = SPEC, image: str = "i", qemu: str = "7.2", cpu: str = "c") -> str:
        return state_digest(spec, image_digest=image, qemu=qemu, host_cpu=cpu)

    others = [
        digest(replace(SPEC, screen_size=(1024, 768))),
        digest(replace(SPEC, memory_mb=2048)),
        digest(replace(SPEC, num_cpus=2)),
        digest(replace(SPEC, accelerator="kvm")),
        digest(image="j"),
        digest(qemu="8.0"),
    ]
    assert len({digest(), *others}) == 7
    assert digest(cpu="d") == digest(), "an emulated processor is the same on every host"
    kvm = replace(SPEC, accelerator="kvm")
    assert digest(kvm, cpu="d") != digest(kvm)


@pytest.fixture
def kernel(tmp_path: Path) -> Path:
    path = tmp_path / "vmlinuz"
    path.write_bytes(b"kernel")
    return path


class Boots:
    def __init__(self, reason: str | None) -> None:
        self.reason, self.count = reason, 0

    def __call__(self, accelerator: str, kernel: Path, initrd: Path) -> str | None:
        self.count += 1
        return self.reason


@pytest.mark.skipif(shutil.which("qemu-system-x86_64") is None, reason="no qemu-system-x86_64, whose version counts")
async def test_kvm_is_used_only_when_a_kernel_boots_and_the_answer_is_kept(tmp_path: Path, kernel: Path) -> None:
    device = tmp_path / "device"
    device.touch()
    for boots, expected in ((Boots(None), "kvm"), (Boots("it hangs"), "tcg")):
        state_dir = tmp_path / expected
        for _ in range(2):
            chosen = await choose_accelerator(
                "auto", kernel=kernel, initrd=kernel, state_dir=state_dir, device=device, boot=boots
            )
            assert chosen == expected
        assert boots.count == 1


async def test_kvm_that_is_required_and_missing_is_an_error(tmp_path: Path, kernel: Path) -> None:
    for wanted in ("auto", "tcg"):
        missing = tmp_path / "none"
        assert (
            await choose_accelerator(wanted, kernel=kernel, initrd=kernel, state_dir=tmp_path, device=missing) == "tcg"
        )
    with pytest.raises(DependencyError, match="KVM does not work here: there is no"):
        await choose_accelerator("kvm", kernel=kernel, initrd=kernel, state_dir=tmp_path, device=tmp_path / "none")


def test_an_image_that_is_not_qcow2_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DependencyError, match="there is no disk image"):
        ForeignImage(tmp_path / "missing.qcow2")
    (tmp_path / "disk.img").write_bytes(b"\0" * 512)
    with pytest.raises(DependencyError, match="qemu-img convert -O qcow2"):
        ForeignImage(tmp_path / "disk.img")


@pytest.mark.skipif(shutil.which("qemu-img") is None, reason="no qemu-img here")
def test_an_image_that_is_based_on_another_is_refused(tmp_path: Path) -> None:
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", tmp_path / "base.qcow2", "1M"], check=True)
    based_on = ["-b", tmp_path / "base.qcow2", "-F", "qcow2"]
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", *based_on, tmp_path / "disk.qcow2"], check=True)
    ForeignImage(tmp_path / "base.qcow2")
    with pytest.raises(DependencyError, match="has a backing file"):
        ForeignImage(tmp_path / "disk.qcow2")


@pytest.mark.parametrize(("size", "reason"), [((100, 100), "too small"), ((1366, 768), "use 1360x768")])
def test_a_screen_that_no_display_has_is_refused(tmp_path: Path, size: tuple[int, int], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        QemuProvider(images=tmp_path, screen_size=size)
