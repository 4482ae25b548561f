"""Whether KVM works here. The existence of /dev/kvm proves nothing: a kernel is booted under it, and KVM is used only
if that kernel reaches its first program. The result is cached for this kernel and version of QEMU until the host boots
again."""

import asyncio
import hashlib
import json
import logging
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Literal, Protocol

from env_server.providers.files import write_whole
from env_server.providers.qemu.command import Accelerator
from env_server.providers.qemu.programs import find, qemu_version
from env_server.providers.requirements import SYSTEM_PATH
from osworld_pipeline.errors import DependencyError

log = logging.getLogger(__name__)

PROBE_LIMIT_S = 15.0
_MARK = "a-kernel-boots-here"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class KernelBoot(Protocol):
    def __call__(self, accelerator: Accelerator, kernel: Path, initrd: Path) -> str | None:
        """Why the kernel did not reach its first program; None if it did."""
        ...


async def choose_accelerator(
    wanted: Literal["auto", "kvm", "tcg"],
    *,
    kernel: Path,
    initrd: Path,
    state_dir: Path,
    device: Path = Path("/dev/kvm"),
    boot: KernelBoot | None = None,
) -> Accelerator:
    """DependencyError if KVM is required and no kernel boots under it."""
    if wanted == "tcg":
        return "tcg"
    reason = await asyncio.to_thread(_why_no_kvm, kernel, initrd, state_dir, device, boot or boot_kernel)
    if reason is None:
        return "kvm"
    if wanted == "kvm":
        raise DependencyError(
            f"KVM does not work here: {reason}; allow nested virtualisation, or use --accelerator tcg"
        )
    log.warning("virtual machines are emulated (TCG), which is about 20 times slower: %s", reason)
    return "tcg"


def _why_no_kvm(kernel: Path, initrd: Path, state_dir: Path, device: Path, boot: KernelBoot) -> str | None:
    """None if it works."""
    refusal = kvm_refusal(device)
    if refusal is not None:
        return refusal
    parts = [hashlib.sha256(kernel.read_bytes()).hexdigest(), qemu_version(), _BOOT_ID.read_text()]
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]
    cache = state_dir / f"kvm-{key}.json"
    try:
        return json.loads(cache.read_text())["reason"]
    except (OSError, ValueError, KeyError):
        pass
    reason = boot("kvm", kernel, initrd)
    for stale in state_dir.glob("kvm-*.json"):
        stale.unlink(missing_ok=True)
    write_whole(cache, json.dumps({"reason": reason}).encode())
    return reason


def kvm_refusal(device: Path = Path("/dev/kvm")) -> str | None:
    """Why KVM cannot even be tried; None if it can."""
    if not device.exists():
        return f"there is no {device}"
    if not os.access(device, os.R_OK | os.W_OK):
        return f"{device} cannot be opened; add this user to the group kvm"
    return None


def boot_kernel(accelerator: Accelerator, kernel: Path, initrd: Path, *, limit_s: float = PROBE_LIMIT_S) -> str | None:
    """A KernelBoot with real QEMU. No disk, no network: the first program is `echo` of the initial RAM disk."""
    command = [
        *(find("setpriv"), "--pdeathsig", "KILL", "--", find("qemu-system-x86_64"), "-nodefaults", "-no-user-config"),
        *("-display", "none", "-accel", accelerator, "-cpu", "host" if accelerator == "kvm" else "max"),
        *("-m", "256", "-no-reboot", "-kernel", str(kernel), "-initrd", str(initrd)),
        *("-append", f"console=ttyS0 quiet panic=-1 rdinit=/bin/echo -- {_MARK}", "-serial", "stdio"),
    ]
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, env={"PATH": SYSTEM_PATH}, cwd="/"
        )
        try:
            until = time.monotonic() + limit_s
            while True:
                has_ended = process.poll() is not None
                said.seek(0)
                text = said.read().decode("utf-8", "replace")
                if _MARK in text:
                    return None
                if has_ended:
                    return f"QEMU ended with {process.returncode}: {' '.join(text.split())[-300:]}"
                if time.monotonic() > until:
                    return f"/dev/kvm exists, but a kernel did not boot under it within {limit_s:g} s"
                time.sleep(0.05)
        finally:
            process.kill()
            process.wait()
