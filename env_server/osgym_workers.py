"""`env-server osgym start|stop|status`: OSGym's workers in the background, as one server over one pool.

Only the process that `start` created is ever ended: its id, its start time and the id of the boot are kept in a file
that only the owner can read. Processes are never looked up by name."""

import argparse
import fcntl
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
import yaml
from pydantic import ValidationError

from env_server.options import add_server_options
from env_server.settings import OsgymSettings, SettingsError, osgym_networks
from osworld_pipeline.domain.top_level_names import python_module
from osworld_pipeline.errors import DependencyError, ReplicaError
from osworld_pipeline.programs.answers import FLAG, print_json
from osworld_pipeline.programs.arguments import ArgumentParser, add_json

STATE_FILE, LOG_FILE, LOCK_FILE, READY_FILE = "osgym.json", "osgym.log", "osgym.lock", "osgym.ready"
POLL_S = 0.05
KILL_WAIT_S = 10.0
NOT_RUNNING = 3
"""Exit status of `status`, as in LSB init scripts."""
_NOT_RUNNING_TEXT = "OSGym's workers are not running"


@dataclass(frozen=True, kw_only=True)
class WorkersState:
    """The server that `start` created."""

    pid: int
    start_ticks: int
    """Start time since boot: a later process with the same id has another value."""
    boot_id: str
    ports: tuple[int, ...]
    host: str


@dataclass(frozen=True, kw_only=True)
class Answer:
    text: str
    facts: Mapping[str, object]
    """For --json."""
    exit_status: int = 0


def main(argv: Sequence[str]) -> int:
    arguments, server_options = _parser().parse_known_args(argv)
    folder: Path = arguments.state_dir.absolute()
    if arguments.command == "start":
        answer = start(arguments, _checked(server_options, as_json=arguments.as_json), folder)
    elif server_options:
        raise SettingsError(f"osgym {arguments.command} has no option {server_options[0]!r}")
    else:
        answer = stop(folder, grace_s=arguments.grace_s) if arguments.command == "stop" else status(folder)
    if arguments.as_json:
        print_json(answer.facts)
    else:
        print(answer.text)
    return answer.exit_status


def start(arguments: argparse.Namespace, server_options: Sequence[str], folder: Path) -> Answer:
    """Returns when every port answers; immediately if the workers are running already, even if they are not ready yet.

    Raises:
        SettingsError: OSGym's config.yaml or the list of allowed addresses is not valid.
        DependencyError: the state cannot be kept in `folder`.
        ReplicaError: the server ended, or was not ready in time; it has been removed.
    """
    ports = read_ports(arguments.config)
    with _locked(folder):
        running = read_state(folder)
        if running is not None:
            return Answer(
                text=f"OSGym's workers are already running: {_describe(running)}",
                facts={**_facts(running), "is_new": False, "log": folder / LOG_FILE},
            )
        process, state = _spawn(arguments, server_options, ports, folder)
    try:
        _wait_ready(process, folder, arguments.wait_s)
    except BaseException:
        _end(state, grace_s=KILL_WAIT_S)
        process.wait(KILL_WAIT_S)
        (folder / STATE_FILE).unlink(missing_ok=True)
        raise
    return Answer(
        text=f"OSGym's workers are ready: {_describe(state)}; log: {folder / LOG_FILE}",
        facts={**_facts(state), "is_new": True, "log": folder / LOG_FILE},
    )


def _spawn(
    arguments: argparse.Namespace, server_options: Sequence[str], ports: tuple[int, ...], folder: Path
) -> tuple[subprocess.Popen[bytes], WorkersState]:
    host = host_for(os.environ, is_local=arguments.local)
    command = [
        *python_module("env_server.main"), "--port", "0",
        "--replicas", str(len(ports) * arguments.replicas_per_port),
        *server_options,
        "--osgym-ports", ",".join(map(str, ports)), "--osgym-host", host,
        "--osgym-replicas-per-port", str(arguments.replicas_per_port),
        "--state-dir", str(folder), "--ready-file", str(folder / READY_FILE),
    ]  # fmt: skip
    if arguments.server_config is not None:
        command += ["--config", str(arguments.server_config)]
    (folder / READY_FILE).unlink(missing_ok=True)
    with (folder / LOG_FILE).open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    state = WorkersState(
        pid=process.pid, start_ticks=_start_ticks(process.pid) or 0, boot_id=_boot_id(), ports=ports, host=host
    )
    try:
        _write_state(folder, state)
    except BaseException:
        process.kill()
        process.wait(KILL_WAIT_S)
        raise
    return process, state


def host_for(environment: Mapping[str, str], *, is_local: bool) -> str:
    """The address to bind: every interface, as OSGym does, if a client on another machine is allowed; else loopback.

    Raises:
        SettingsError: the list of addresses cannot be read.
    """
    if is_local or all(network.is_loopback for network in osgym_networks(environment)):
        return "127.0.0.1"
    return "0.0.0.0"  # noqa: S104 - access is limited by the list of addresses


def read_ports(path: Path) -> tuple[int, ...]:
    """The `ports` of OSGym's config.yaml.

    Raises:
        SettingsError: it cannot be read, or has no list of ports.
    """
    try:
        fields = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"cannot read {path}: {error.strerror}; give OSGym's config.yaml with --config") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} is not valid YAML: {' '.join(str(error).split())[:200]}") from error
    ports = fields.get("ports") if isinstance(fields, dict) else None
    try:
        numbers = OsgymSettings.model_validate({"ports": ports}).ports
    except ValidationError as error:
        raise SettingsError(f"{path} needs a list 'ports' of numbers from 1 to 65535, not {ports!r:.80}") from error
    if not numbers or len(set(numbers)) != len(numbers):
        raise SettingsError(f"the 'ports' of {path} are empty or contain a duplicate: {list(numbers)!r:.80}")
    return numbers


def stop(folder: Path, *, grace_s: float) -> Answer:
    """Sends TERM, and KILL after the grace period. Stopping twice is no error."""
    with _locked(folder):
        state = read_state(folder)
        if state is None:
            answer = Answer(text=_NOT_RUNNING_TEXT, facts={"pid": None, "was_killed": False})
        else:
            was_killed = _end(state, grace_s=grace_s)
            answer = Answer(
                text=f"OSGym's workers are {'killed' if was_killed else 'stopped'} (process {state.pid})",
                facts={"pid": state.pid, "was_killed": was_killed},
            )
        for name in (STATE_FILE, READY_FILE):
            (folder / name).unlink(missing_ok=True)
    return answer


def status(folder: Path) -> Answer:
    state = read_state(folder)
    if state is None:
        return Answer(text=_NOT_RUNNING_TEXT, facts={"status": "stopped"}, exit_status=NOT_RUNNING)
    running, facts = f"OSGym's workers are running: {_describe(state)}", _facts(state)
    try:
        url = json.loads((folder / READY_FILE).read_text())["url"]
        health = httpx.get(f"{url}/health", timeout=5.0, trust_env=False).json()
        counts = f"{health['episodes']} episodes, {health['free']} of {health['replicas']} replicas free; {url}"
        counted = {name: health[name] for name in ("episodes", "free", "replicas")}
    except FileNotFoundError:
        return Answer(text=f"{running}\nthe server is starting", facts={"status": "starting", **facts})
    except (OSError, ValueError, KeyError, httpx.HTTPError) as error:
        silent = f"the server does not answer ({type(error).__name__}); see {folder / LOG_FILE}"
        facts = {"status": "no_answer", **facts, "log": folder / LOG_FILE}
        return Answer(text=f"{running}\n{silent}", facts=facts, exit_status=1)
    return Answer(text=f"{running}\n{counts}", facts={"status": "running", **facts, "url": url, **counted})


def read_state(folder: Path) -> WorkersState | None:
    """None if no server was started, or it is not running any more."""
    try:
        fields = json.loads((folder / STATE_FILE).read_text())
        state = WorkersState(**{**fields, "ports": tuple(fields["ports"])})
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None
    return state if _is_alive(state) else None


def _end(state: WorkersState, *, grace_s: float) -> bool:
    """Whether it had to be killed. Signals are sent through a handle on the process, not to its id."""
    try:
        handle = os.pidfd_open(state.pid)
    except ProcessLookupError:
        return False
    try:
        if not _is_alive(state):
            return False
        _signal(handle, signal.SIGTERM)
        if _has_ended(handle, grace_s):
            return False
        _signal(handle, signal.SIGKILL)
        if not _has_ended(handle, KILL_WAIT_S):
            raise ReplicaError(f"process {state.pid} does not exit; it hangs in the kernel")
        return True
    finally:
        os.close(handle)


def _signal(handle: int, number: signal.Signals) -> None:
    try:
        signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        return


def _has_ended(handle: int, limit_s: float) -> bool:
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    return bool(poll.poll(limit_s * 1000))


def _wait_ready(process: subprocess.Popen[bytes], folder: Path, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not (folder / READY_FILE).exists():
        if process.poll() is not None:
            raise ReplicaError(f"the server ended with status {process.returncode}: {_stderr_tail(folder)}")
        if time.monotonic() > deadline:
            raise ReplicaError(
                f"the server was not ready within {limit_s:g} s and was ended; see {folder / LOG_FILE}, "
                "or increase the limit with --wait-s"
            )
        time.sleep(POLL_S)


def _stderr_tail(folder: Path) -> str:
    lines = (folder / LOG_FILE).read_text(errors="replace").strip().splitlines()
    return lines[-1][:500] if lines else "no output"


def _write_state(folder: Path, state: WorkersState) -> None:
    """Atomically, and readable only for the owner."""
    descriptor, temporary = tempfile.mkstemp(dir=folder, prefix=f".{STATE_FILE}.")
    try:
        with os.fdopen(descriptor, "w") as file:
            json.dump(asdict(state), file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, folder / STATE_FILE)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        raise


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One command at a time: two concurrent starts would need the same ports."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / LOCK_FILE).open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
    except OSError as error:
        raise DependencyError(f"cannot keep the workers' state in {folder}: {error.strerror or error}") from error


def _is_alive(state: WorkersState) -> bool:
    return state.boot_id == _boot_id() and _start_ticks(state.pid) == state.start_ticks


def _start_ticks(pid: int) -> int | None:
    """The start time of the process, in ticks since boot; None if it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == "Z" else int(fields[19])


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _describe(state: WorkersState) -> str:
    first, last = state.ports[0], state.ports[-1]
    ports = f"port {first}" if len(state.ports) == 1 else f"{len(state.ports)} ports, {first} to {last}"
    return f"process {state.pid}, {ports} on {state.host}"


def _facts(state: WorkersState) -> dict[str, object]:
    return {"pid": state.pid, "host": state.host, "ports": state.ports}


def _checked(server_options: list[str], *, as_json: bool) -> list[str]:
    """Invalid options end the program with a message, as argparse does."""
    parser = ArgumentParser(prog="env-server osgym start")
    add_server_options(parser)
    parser.parse_args([*server_options, *([FLAG] if as_json else [])])
    return server_options


def _parser() -> argparse.ArgumentParser:
    common = ArgumentParser(add_help=False, allow_abbrev=False)
    common.add_argument("--state-dir", type=Path, default=Path("var/desktops"), help="folder of the workers' state")
    add_json(common)
    parser = ArgumentParser(prog="env-server osgym", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    begin = commands.add_parser(
        "start", parents=[common], allow_abbrev=False, help="in the background; further options are env-server's own"
    )
    begin.add_argument("--config", type=Path, default=Path("config.yaml"), help="OSGym's config.yaml with its ports")
    begin.add_argument("--local", action="store_true", help="on 127.0.0.1 only, even if clients elsewhere are allowed")
    begin.add_argument("--replicas-per-port", type=int, default=2, help="desktops of each port (default 2)")
    begin.add_argument("--server-config", type=Path, metavar="FILE", help="env-server's own TOML")
    begin.add_argument("--wait-s", type=float, default=600.0, help="longest wait for the desktops (default 600)")
    end = commands.add_parser("stop", parents=[common], allow_abbrev=False, help="only what start created")
    end.add_argument("--grace-s", type=float, default=45.0, help="longest wait for episodes before KILL (default 45)")
    commands.add_parser("status", parents=[common], allow_abbrev=False, help="ports, episodes and free replicas")
    return parser
