"""This machine: memory, disk, open files, and its GPU."""

import importlib.metadata
import os
import resource
import shutil
import sys
from pathlib import Path

from osworld_pipeline.doctor.programs import ask
from osworld_pipeline.domain.finding import Finding, Status
from osworld_pipeline.domain.remedies import how_to_set_up
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.domain.top_level_names import shadow_sentence
from osworld_pipeline.errors import DependencyError, StoreError
from osworld_pipeline.file_locks import MARKER, uses_lock_files
from osworld_pipeline.file_system import local_locks, need_file_system

GB = 1e9
MIN_FREE_BYTES = 1_000_000_000
"""Free disk space below which the demo refuses to start."""
EASY_FREE_BYTES = 5_000_000_000
MIN_MEMORY_BYTES = 1_500_000_000
EASY_MEMORY_BYTES = 4_000_000_000
MIN_FREE_FILES = 50_000
"""The check warns if fewer new files can be created on the disk; a demo writes many screenshots and parts."""
EASY_OPEN_FILES = 4096
NVIDIA_LIMIT_S = 6.0
TORCH_LIMIT_S = 25.0
_TRY_TORCH = (
    "import torch; name = torch.cuda.get_device_name() if torch.cuda.is_available() else ''; "
    "total = float((torch.ones(256, 256, device='cuda') @ torch.ones(256, 256, device='cuda')).sum()) if name else 0; "
    "print(torch.__version__, torch.version.cuda, torch.cuda.device_count() if name else 0, total == 256.0**3, sep='|')"
)


def check_memory(name: str, *, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> Finding:
    """The memory of the machine or of the container, whichever is less."""
    fields = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines() if ":" in line)
    total, free = (int(fields[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
    allowed = _allowed_bytes(cgroup)
    if allowed is not None and allowed[0] < total:
        total, free = allowed[0], min(free, allowed[0] - allowed[1])
    text = f"{free / GB:.1f} GB of {total / GB:.1f} GB memory are free"
    if free < MIN_MEMORY_BYTES:
        remedy = "stop other programs, or use a larger machine"
        return Finding(name=name, status=Status.MISSING, message=f"only {text}", remedy=remedy)
    if free < EASY_MEMORY_BYTES:
        remedy = "use fewer desktops: --set desktop.num_replicas=1"
        return Finding(name=name, status=Status.WARN, message=f"only {text}", remedy=remedy)
    return Finding(name=name, status=Status.OK, message=text)


def check_disk(name: str, state: StateDir) -> Finding:
    """The disk of the state folder."""
    folder = next(path for path in (state.root, *state.root.parents) if path.exists())
    free = shutil.disk_usage(folder).free
    figures = os.statvfs(folder)
    text = f"{free / GB:.1f} GB are free on the disk of {state.root}"
    remedy = "free some space, or give --state a folder on another disk"
    if not os.access(folder, os.W_OK | os.X_OK):
        text = f"{folder} cannot be written by this user"
        return Finding(
            name=name, status=Status.MISSING, message=text, remedy="give --state a folder that you can write"
        )
    if free < MIN_FREE_BYTES:
        return Finding(name=name, status=Status.MISSING, message=f"only {text}", remedy=remedy)
    if figures.f_files and figures.f_favail < MIN_FREE_FILES:
        text = f"only {figures.f_favail:,} more files can be created on the disk of {state.root}"
        return Finding(name=name, status=Status.WARN, message=text, remedy=remedy)
    if free < EASY_FREE_BYTES:
        return Finding(name=name, status=Status.WARN, message=f"only {text}", remedy=remedy)
    return Finding(name=name, status=Status.OK, message=text)


def check_file_system(name: str, state: StateDir) -> Finding:
    """Writes, locks and renames a file in the state folder."""
    folder = next(path for path in (state.root, *state.root.parents) if path.exists())
    try:
        need_file_system(folder)
    except StoreError as error:
        message, _, remedy = str(error).rpartition(": ")
        return Finding(name=name, status=Status.MISSING, message=message, remedy=remedy)
    if uses_lock_files(folder.absolute()):
        text = f"{folder} supports lock files and atomic renames"
        return Finding(name=name, status=Status.OK, message=text)
    if option := local_locks(folder):
        return Finding(
            name=name,
            status=Status.WARN,
            message=f"{folder} is mounted with {option}: its locks exclude only processes of this host",
            remedy=f"mount it without {option} if several hosts share the state, or create the file {folder / MARKER} "
            "while no process uses it",
        )
    return Finding(name=name, status=Status.OK, message=f"{folder} supports locks and atomic renames")


def check_open_files(name: str) -> Finding:
    """Our programs raise the soft limit to the hard limit."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard == resource.RLIM_INFINITY or hard >= EASY_OPEN_FILES:
        shown = "any number of" if hard == resource.RLIM_INFINITY else f"up to {hard:,}"
        return Finding(name=name, status=Status.OK, message=f"a process may have {shown} open files")
    return Finding(
        name=name,
        status=Status.WARN,
        message=f"a process may have {hard:,} open files, too few for many desktops",
        remedy="as root: echo '* hard nofile 65536' > /etc/security/limits.d/nofile.conf, and log in again",
    )


def check_names(name: str, folder: Path) -> Finding:
    """Whether Python programs that are started in `folder` import our packages."""
    sentence = shadow_sentence(folder)
    if not sentence:
        return Finding(name=name, status=Status.OK, message=f"{folder} has no packages with names of ours")
    remedy = "rename them, or run the commands in another folder"
    return Finding(name=name, status=Status.WARN, message=sentence, remedy=remedy)


def check_gpu(name: str, *, limit_s: float = NVIDIA_LIMIT_S) -> Finding:
    if shutil.which("nvidia-smi") is None:
        text = "no NVIDIA GPU (there is no nvidia-smi): training and sampling run on the CPU"
        return Finding(
            name=name, status=Status.WARN, message=text, remedy="use a machine with an NVIDIA GPU and its driver"
        )
    command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    said = ask(command, limit_s=limit_s)
    lines = [line.strip() for line in said.stdout.splitlines() if line.strip()]
    if said.status or not lines:
        why = said.stdout.strip().splitlines()[-1:] or [said.stderr_tail]
        text = f"nvidia-smi finds no GPU ({why[0]}): training and sampling run on the CPU"
        remedy = "fix the driver, so that nvidia-smi lists the GPU"
        return Finding(name=name, status=Status.WARN, message=text, remedy=remedy)
    return Finding(name=name, status=Status.OK, message=f"{len(lines)} GPU{'s' * (len(lines) > 1)}: {lines[0]}")


def check_torch(name: str) -> Finding:
    """Multiplies on the GPU if there is one: a build for another driver imports correctly and fails only then."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return Finding(
            name=name, status=Status.MISSING, message="torch is not installed", remedy=how_to_set_up("train")
        )
    if shutil.which("nvidia-smi") is None:
        return Finding(name=name, status=Status.OK, message=f"torch {version}, for the CPU")
    said = ask([sys.executable, "-c", _TRY_TORCH], limit_s=TORCH_LIMIT_S)
    if said.status:
        raise DependencyError(f"torch {version} does not work here: {said.stderr_tail}")
    version, cuda, num_devices, is_right = said.stdout.strip().splitlines()[-1].split("|")
    if num_devices == "0":
        return Finding(
            name=name,
            status=Status.WARN,
            message=f"torch {version} (CUDA {cuda}) sees no GPU",
            remedy=f"if nvidia-smi lists one, uninstall torch, then UV_TORCH_BACKEND=auto {how_to_set_up('train')}",
        )
    if is_right != "True":
        text = f"torch {version} (CUDA {cuda}) computes wrong results on the GPU"
        return Finding(name=name, status=Status.MISSING, message=text, remedy="test the GPU: nvidia-smi -q -d ECC")
    gpus = "1 GPU" if num_devices == "1" else f"{num_devices} GPUs"
    return Finding(name=name, status=Status.OK, message=f"torch {version} (CUDA {cuda}) works on {gpus}")


def _allowed_bytes(cgroup: Path) -> tuple[int, int] | None:
    """Limit and use of this container's control group, version 2 or 1; None without a limit. The inactive part of the
    kernel's file cache does not count as used."""
    for folder, limit, used, cached in (
        (cgroup, "memory.max", "memory.current", "inactive_file"),
        (cgroup / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            in_use = int((folder / used).read_text()) - int(statistics[cached])
            return int((folder / limit).read_text()), in_use
        except (OSError, ValueError, KeyError):
            continue
    return None
