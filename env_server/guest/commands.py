"""Runs commands as the desktop's user. An answer waits for the command itself, not for processes it left in the
background, and output beyond a limit is cut, so a command can neither block the agent nor fill its memory."""

import errno
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

from .programs import start_program
from .server import failure_status

MAX_OUTPUT_BYTES = 8 * 1024 * 1024
MAX_TIMEOUT_S = 3600.0

_FAULTS_OF_A_COMMAND = (
    errno.ENOENT, errno.EACCES, errno.ENOEXEC, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG,
    errno.E2BIG, errno.EPERM, errno.EINVAL, errno.ETXTBSY,
)  # fmt: skip

Answer = tuple[int, dict[str, Any]]
"""HTTP status and JSON body, as OSWorld's guest returns them."""


def arguments_of(command: Any, *, shell: bool) -> str | list[str]:
    """The command in the form that the operating system expects. ValueError if it is not a command."""
    if isinstance(command, str):
        command = command if shell else shlex.split(command)
    elif isinstance(command, Sequence) and all(isinstance(part, str) for part in command):
        # With a shell a list is one command line; subprocess would pass the rest to the shell as its arguments.
        command = " ".join(command) if shell else list(command)
    else:
        raise ValueError("command must be a string or a list of strings")
    if not command:
        raise ValueError("command is empty")
    if isinstance(command, list):
        return [os.path.expanduser(part) if part.startswith("~/") else part for part in command]
    return command


def run_command(
    command: Any,
    *,
    shell: bool,
    timeout_s: float,
    home: str,
    cwd: str | None = None,
    stdin: bytes = b"",
    environment: Mapping[str, str] | None = None,
) -> Answer:
    """Runs the command to its end; at the limit, kills it and its process group. `environment` is added to the
    desktop's own."""
    try:
        argv = arguments_of(command, shell=shell)
    except ValueError as error:
        return 400, {"status": "error", "message": str(error)}
    limit_s = min(max(timeout_s, 0.1), MAX_TIMEOUT_S)
    # Files, not pipes: a program left in the background keeps a pipe open and the answer waiting. In memory, so that
    # the output is available even if the disk is full.
    with _memory_file("output") as output, _memory_file("error") as error_output:
        try:
            process = start_program(
                argv,
                shell=shell,
                stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
                stdout=output,
                stderr=error_output,
                cwd=cwd or home,
                env={**os.environ, **(environment or {})},
            )
        except OSError as error:
            # If this desktop can start no process at all (out of memory or processes, or dying), the command is not at
            # fault, and the answer must not look like the command's own error.
            status = 500 if error.errno in _FAULTS_OF_A_COMMAND else failure_status(error)
            return status, {"status": "error", "message": str(error)}
        except ValueError as error:
            return 500, {"status": "error", "message": str(error)}
        try:
            process.communicate(stdin or None, timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            message = f"Command {argv!r} timed out after {limit_s:g} seconds"
            return 500, {"status": "error", "message": message, "output": _read(output), "returncode": -1}
        return 200, {
            "status": "success",
            "output": _read(output),
            "error": _read(error_output),
            "returncode": process.returncode,
        }


def launch(command: Any, *, shell: bool, home: str) -> Answer:
    """Starts a program and does not wait for it."""
    try:
        argv = arguments_of(command, shell=shell)
        start_program(
            argv,
            shell=shell,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=home,
        )
    except (OSError, ValueError) as error:
        return 500, {"status": "error", "message": str(error)}
    text = argv if isinstance(argv, str) else " ".join(argv)
    return 200, {"status": "success", "message": f"{text} launched successfully"}


def run_python(body: Mapping[str, Any], *, home: str) -> Answer:
    code = body.get("code")
    if not isinstance(code, str) or not code:
        message = "code must be a string"
        return 400, {"status": "error", "message": message, "error": message}
    argv = [sys.executable, "-c", code]
    status, answer = run_command(argv, shell=False, timeout_s=float(body.get("timeout") or 90.0), home=home)
    message = answer.get("message") or answer.get("output", "")
    return status, {"error": message, "return_code": answer.get("returncode", -1)} | answer | {"message": message}


def run_bash_script(body: Mapping[str, Any], *, home: str) -> Answer:
    script = body.get("script")
    if not isinstance(script, str) or not script:
        return 400, {"status": "error", "message": "script must be a string"}
    cwd = body.get("working_dir") or home
    if not os.path.isdir(os.path.expanduser(str(cwd))):
        return 400, {"status": "error", "message": f"working_dir {cwd!r} does not exist"}
    timeout_s = float(body.get("timeout") or 100.0)
    with tempfile.NamedTemporaryFile("w", suffix=".sh", encoding="utf-8") as file:
        file.write(script)
        file.flush()
        return run_command(
            ["/bin/bash", file.name], shell=False, timeout_s=timeout_s, home=home, cwd=os.path.expanduser(str(cwd))
        )


def _memory_file(name: str) -> BinaryIO:
    return os.fdopen(os.memfd_create(name), "w+b")


def _read(file: BinaryIO) -> str:
    file.seek(0)
    data = file.read(MAX_OUTPUT_BYTES + 1)
    cut = "\n[output cut]" if len(data) > MAX_OUTPUT_BYTES else ""
    return data[:MAX_OUTPUT_BYTES].decode("utf-8", "replace") + cut
