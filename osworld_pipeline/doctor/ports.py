"""Which processes listen on which ports: read from /proc, without connecting to or opening a port."""

from collections.abc import Iterator
from pathlib import Path

from osworld_pipeline.domain.finding import Finding, Status

LISTENS = "0A"
_SHOWN_CHARS = 60


def check_port(name: str, port: int, purpose: str, own: tuple[str, ...], way_out: str, proc: Path) -> Finding:
    """`own`: words in the command line of the expected program."""
    inodes = set(listening(port, proc))
    if not inodes:
        return Finding(name=name, status=Status.OK, message=f"port {port} is free for {purpose}")
    pids = list(holders(inodes, proc))
    if not pids:
        text = f"port {port} ({purpose}) is held by a program of another user"
        return Finding(name=name, status=Status.WARN, message=text, remedy=way_out)
    command = command_of(pids[0], proc)
    if any(word in command for word in own):
        return Finding(name=name, status=Status.OK, message=f"{purpose} runs on port {port}: process {pids[0]}")
    text = f"port {port} ({purpose}) is held by process {pids[0]} ({command[:_SHOWN_CHARS]})"
    return Finding(name=name, status=Status.WARN, message=text, remedy=way_out)


def listening(port: int, proc: Path = Path("/proc")) -> Iterator[str]:
    """Inodes of the sockets that listen on the port."""
    for table in ("tcp", "tcp6"):
        try:
            lines = (proc / "net" / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for fields in map(str.split, lines):
            if fields[3] == LISTENS and int(fields[1].rpartition(":")[2], 16) == port:
                yield fields[9]


def holders(inodes: set[str], proc: Path = Path("/proc")) -> Iterator[int]:
    """Processes that have one of these sockets open, as far as this user may see."""
    wanted = {f"socket:[{inode}]" for inode in inodes}
    for folder in sorted(proc.glob("[0-9]*"), key=lambda path: int(path.name)):
        try:
            if any(str(link.readlink()) in wanted for link in (folder / "fd").iterdir()):
                yield int(folder.name)
        except OSError:
            continue  # it has exited, or belongs to another user


def command_of(pid: int, proc: Path = Path("/proc")) -> str:
    try:
        return (proc / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
    except OSError:
        return ""
