"""`run_process` skips the interpreter's teardown; status, output and exit handlers are as usual."""

import gc
import os
import subprocess
import sys

import pytest

from osworld_pipeline.programs.short_process import collect_seldom, imports_without_collection


def ended(body: str, *, output: int | None = subprocess.PIPE) -> "subprocess.CompletedProcess[str]":
    """Runs `body` as the program's main function."""
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    code = f"import sys\nfrom osworld_pipeline.programs.short_process import run_process\ndef main():\n{lines}\n"
    return subprocess.run(
        [sys.executable, "-c", f"{code}run_process(main)"],
        stdout=output, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("return 0", 0),
        ("return None", 0),
        ("return 3", 3),
        ("sys.exit()", 0),
        ("sys.exit(5)", 5),
        ("sys.exit(-1)", 255),
        ("sys.exit('a reason')", 1),
        ("raise ValueError('a defect')", 1),
        ("import os, signal; os.kill(os.getpid(), signal.SIGINT)", -2),
    ],
)
def test_the_status_is_that_of_an_ordinary_program(body: str, status: int) -> None:
    assert ended(body).returncode == status


def test_the_last_output_of_a_program_is_printed() -> None:
    assert ended("sys.exit('a reason')").stderr == "a reason\n"
    assert "ValueError: a defect" in ended("raise ValueError('a defect')").stderr
    assert ended("print('a line without its end', end='')\nreturn 0").stdout == "a line without its end"


def test_exit_handlers_run_and_threads_end_first() -> None:
    done = ended(
        "import atexit, tempfile, threading, time, weakref\n"
        "atexit.register(print, 'handler')\n"
        "kept = tempfile.TemporaryDirectory()\n"
        "main.kept = kept\n"
        "print(kept.name)\n"
        "threading.Thread(target=lambda: (time.sleep(0.3), print('thread'))).start()\n"
        "return 0"
    )
    folder, *rest = done.stdout.splitlines()
    assert rest == ["thread", "handler"]
    assert subprocess.run(["ls", folder], capture_output=True, check=False).returncode != 0, "it was removed"


def test_the_interpreter_is_not_torn_down() -> None:
    body = "class Late:\n    def __del__(self): print('torn down')\nmain.kept = Late()\nreturn 0"
    assert ended(body).stdout == ""


def test_output_that_cannot_be_written_sets_the_exit_status() -> None:
    with open("/dev/full", "w") as full:
        assert ended("print('x')\nreturn 0", output=full.fileno()).returncode == 120


def test_garbage_collection_is_off_during_imports_and_on_again_after_a_failed_import() -> None:
    def fail_to_import() -> None:
        with imports_without_collection():
            assert not gc.isenabled()
            raise ImportError("a package is missing")

    with pytest.raises(ImportError):
        fail_to_import()
    assert gc.isenabled()


def test_garbage_of_a_small_program_is_collected_less_often() -> None:
    before = gc.get_threshold()
    try:
        collect_seldom()
        assert gc.get_threshold() == (50_000, *before[1:])
    finally:
        gc.set_threshold(*before)
