"""The guest agent's own parts that need no desktop: bodies, commands, the accessibility XML, desktop entries; and the
client's errors with a faulty guest."""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from xml.etree import ElementTree

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from env_server.guest.accessibility import NAMESPACES, build_element, plain_text
from env_server.guest.commands import MAX_OUTPUT_BYTES, arguments_of, launch, run_bash_script, run_command
from env_server.guest.opening import expand_command
from env_server.guest.server import GuestServer, Reply, Request, Route, parse_body
from env_server.guest_client import GuestCall, GuestClient
from osworld_pipeline.errors import ActionParseError, EvaluatorError, ReplicaError, SetupError


class OneRoute:
    """Answers every request in one way."""

    def __init__(self, route: Route) -> None:
        self._route = route

    def find(self, method: str, path: str) -> Route | None:
        return None if path == "/nowhere" else self._route


@pytest.fixture
async def guest_of(tmp_path: Path) -> AsyncIterator[Callable[[Route], GuestClient]]:
    """Makes a real agent server with one answer, and a client of it."""
    servers: list[GuestServer] = []
    clients: list[GuestClient] = []

    def make(route: Route) -> GuestClient:
        path = str(tmp_path / f"{len(servers)}.socket")
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(path)
        listener.listen()
        servers.append(GuestServer(listener, OneRoute(route)))
        threading.Thread(target=servers[-1].serve_forever, args=(0.01,), daemon=True).start()
        clients.append(GuestClient.over_unix_socket(path, name="replica-7"))
        return clients[-1]

    yield make
    for client in clients:
        await client.close()
    for server in servers:
        server.shutdown()
        server.server_close()


GuestMaker = Callable[[Route], GuestClient]


def answer(body: object, status: int = 200) -> Route:
    return lambda _: Reply(body, status=status)


async def test_uploaded_bytes_arrive_unchanged_through_multipart(guest_of: GuestMaker) -> None:
    seen: list[Request] = []

    def route(request: Request) -> Reply:
        seen.append(request)
        return Reply({})

    data = bytes(range(256)) + b"\r\n--x--\r\n"
    await guest_of(route).upload("/home/user/ü.bin", data)
    assert seen[0].fields["file_data"] == data
    assert seen[0].text("file_path") == "/home/user/ü.bin"


async def test_a_command_that_failed_is_a_result_and_not_an_error(guest_of: GuestMaker) -> None:
    done = await guest_of(answer({"status": "success", "output": "", "error": "no", "returncode": 2})).execute("false")
    assert (done.status, done.returncode, done.error) == ("success", 2, "no")
    late = await guest_of(answer({"status": "error", "message": "timed out"}, 500)).execute("sleep 9")
    assert (late.status, late.returncode, late.error) == ("error", -1, "timed out")


async def test_a_missing_file_is_none(guest_of: GuestMaker) -> None:
    assert await guest_of(answer({}, 404)).file("/nowhere") is None


async def test_a_file_or_folder_that_may_not_be_read_is_none_and_not_a_fault(guest_of: GuestMaker) -> None:
    def refuse(_: Request) -> Reply:
        raise PermissionError(13, "Permission denied", "/root/a")

    guest = guest_of(refuse)
    assert (await guest.file("/root/a"), await guest.list_directory("/root"), await guest.wallpaper()) == (None,) * 3


@pytest.mark.parametrize("error", [FileNotFoundError(2, "no", "a"), NotADirectoryError(20, "no"), OSError(36, "long")])
async def test_a_file_at_an_invalid_path_is_none(guest_of: GuestMaker, error: OSError) -> None:
    def refuse(_: Request) -> Reply:
        raise error

    assert await guest_of(refuse).file("/a") is None


async def test_a_file_too_large_to_grade_is_not_a_missing_file(guest_of: GuestMaker) -> None:
    with pytest.raises(EvaluatorError, match="refuses to send /a: larger"):
        await guest_of(answer({"error": "larger"}, 413)).file("/a")


@pytest.mark.parametrize("status", [400, 500, 501])
async def test_a_desktop_that_cannot_record_is_reported_and_not_replaced(guest_of: GuestMaker, status: int) -> None:
    guest = guest_of(answer({"message": "no ffmpeg"}, status))
    with pytest.raises(SetupError, match="replica-7 cannot record: no ffmpeg"):
        await guest.start_recording()


async def test_quality_and_size_are_sent_with_the_format(guest_of: GuestMaker) -> None:
    seen: list[Request] = []

    def route(request: Request) -> Reply:
        seen.append(request)
        return Reply(b"", content_type="image/jpeg")

    await guest_of(route).screenshot("jpeg", quality=40, size=(64, 32))
    assert seen[0].query == {"format": "jpeg", "quality": "40", "width": "64", "height": "32"}


async def test_a_refused_call_is_an_action_parse_error(guest_of: GuestMaker) -> None:
    def refuse(_: Request) -> Reply:
        raise ValueError("there is no call 'exec'")

    with pytest.raises(ActionParseError, match="no call 'exec'"):
        await guest_of(refuse).act([GuestCall(name="exec")])


async def test_python_code_that_ran_has_only_its_own_error_output(guest_of: GuestMaker) -> None:
    fields = {"status": "success", "message": "2\n", "output": "2\n", "error": "", "returncode": 0}
    assert (await guest_of(answer(fields)).run_python("print(2)")).error == ""


async def test_a_refused_set_up_verb_is_a_setup_error(guest_of: GuestMaker) -> None:
    with pytest.raises(SetupError, match=r"replica-7 answered /setup/close_window with 404: no window 'X'"):
        await guest_of(answer({"error": "no window 'X'"}, 404)).close_window("X")


async def test_an_invalid_answer_of_a_guest_is_a_replica_error_that_names_the_guest(guest_of: GuestMaker) -> None:
    guest = guest_of(answer("<html>"))
    for ask in (guest.screenshot, guest.accessibility, guest.cursor_position, guest.screen_size):
        with pytest.raises(ReplicaError, match="replica-7"):
            await ask()


async def test_a_crash_in_the_guest_is_reported_and_is_not_a_lost_connection(guest_of: GuestMaker) -> None:
    def crash(_: Request) -> Reply:
        raise RuntimeError("boom")

    with pytest.raises(ReplicaError, match="503: RuntimeError: boom"):
        await guest_of(crash).accessibility()


async def test_a_silent_guest_is_a_replica_error_within_the_limit(guest_of: GuestMaker) -> None:
    release = threading.Event()

    def wait(_: Request) -> Reply:
        release.wait(10)
        return Reply(b"")

    started = time.monotonic()
    with pytest.raises(ReplicaError, match=r"did not answer /screenshot within 0.2 s"):
        await guest_of(wait).screenshot(timeout_s=0.2)
    release.set()
    assert time.monotonic() - started < 5


async def test_a_guest_that_is_gone_is_a_replica_error(tmp_path: Path) -> None:
    async with GuestClient.over_unix_socket(str(tmp_path / "none"), name="replica-7") as guest:
        with pytest.raises(ReplicaError, match="cannot be reached"):
            await guest.platform()


@given(st.dictionaries(st.text("abc_", min_size=1, max_size=6), st.binary(max_size=200), min_size=1, max_size=4))
def test_multipart_bodies_round_trip(fields: dict[str, bytes]) -> None:
    files = {name: ("f", data, "application/octet-stream") for name, data in fields.items()}
    request = httpx.Request("POST", "http://guest/", files=files)
    assert parse_body(request.headers["content-type"], request.read()) == fields


@given(st.binary(max_size=200), st.sampled_from(["multipart/form-data; boundary=x", "application/json", ""]))
def test_any_body_is_either_parsed_or_refused(body: bytes, content_type: str) -> None:
    with contextlib.suppress(ValueError):
        assert isinstance(parse_body(content_type, body), dict)


def test_commands_are_split_and_their_home_expanded_as_osworlds_guest_does() -> None:
    assert arguments_of("ls -l 'a b'", shell=False) == ["ls", "-l", "a b"]
    assert arguments_of("ls -l 'a b' | wc", shell=True) == "ls -l 'a b' | wc"
    assert arguments_of(["echo", "a;b"], shell=False) == ["echo", "a;b"]
    assert arguments_of(["cat", "~/x"], shell=False) == ["cat", os.path.expanduser("~/x")]
    for nothing in ("", [], None, [1]):
        with pytest.raises(ValueError, match="command"):
            arguments_of(nothing, shell=False)


def test_a_command_answers_output_error_and_status(tmp_path: Path) -> None:
    status, body = run_command("echo a; echo b >&2; exit 3", shell=True, timeout_s=10, home=str(tmp_path))
    assert (status, body) == (200, {"status": "success", "output": "a\n", "error": "b\n", "returncode": 3})
    status, body = run_bash_script({"script": "pwd"}, home=str(tmp_path))
    assert body["output"].strip() == str(tmp_path)


def test_a_missing_program_is_an_error_and_not_a_crash(tmp_path: Path) -> None:
    assert run_command(["no-such-program"], shell=False, timeout_s=1, home=str(tmp_path))[0] == 500
    assert launch(["no-such-program"], shell=False, home=str(tmp_path))[0] == 500


def test_a_desktop_that_cannot_start_processes_reports_this_and_not_a_failed_command() -> None:
    code = (
        "import resource; from env_server.guest.commands import run_command;"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (6, 6));"
        "print(run_command(['true'], shell=False, timeout_s=5, home='/')[0])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == "503", done.stderr


def test_endless_output_is_cut(tmp_path: Path) -> None:
    command = f"head -c {MAX_OUTPUT_BYTES + 10} /dev/zero | tr '\\0' x"
    _, body = run_command(command, shell=True, timeout_s=30, home=str(tmp_path))
    assert body["output"].endswith("[output cut]")
    assert len(body["output"]) < MAX_OUTPUT_BYTES + 100


def test_an_element_has_the_xml_of_osworld() -> None:
    element = build_element(
        role="push button",
        name="OK\x00",
        text="a\ufffcb",
        states=["showing", "visible"],
        attributes=[("toolkit", "gtk")],
        place=(1, 2, 30, 40),
        value=(5.0, 0.0, 10.0, 1.0),
        actions=[("click", "Clicks", "<Alt>o")],
    )
    again = ElementTree.fromstring(ElementTree.tostring(element, encoding="unicode"))
    st_, cp, val, act = (NAMESPACES[key] for key in ("st", "cp", "val", "act"))
    assert (again.tag, again.get("name"), again.text) == ("push-button", "OK", "ab")
    assert again.get(f"{{{st_}}}showing") == "true"
    assert again.get(f"{{{cp}}}screencoord") == "(1, 2)"
    assert again.get(f"{{{cp}}}size") == "(30, 40)"
    assert again.get(f"{{{val}}}max") == "10.0"
    assert again.get(f"{{{act}}}click_kb") == "<Alt>o"


@given(role=st.text(max_size=20), name=st.text(max_size=20), key=st.text(max_size=20), text=st.text(max_size=20))
def test_the_tree_is_valid_xml_for_any_text_of_a_program(role: str, name: str, key: str, text: str) -> None:
    element = build_element(role=role, name=name, text=text, attributes=[(key, text)], states=[key])
    again = ElementTree.fromstring(ElementTree.tostring(element, encoding="unicode"))
    # XML reads every line end as \n in text and as a space in an attribute, unless written as a reference.
    assert (again.get("name") or "").split() == plain_text(name).split()


def test_a_desktop_entrys_command_gets_the_file_at_its_placeholder() -> None:
    path = Path("/home/user/a b.txt")
    assert expand_command("mousepad %U", path) == ["mousepad", "file:///home/user/a%20b.txt"]
    assert expand_command("viewer --title %c %f", path) == ["viewer", "--title", "/home/user/a b.txt"]
    assert expand_command("xterm -e vi", path) == ["xterm", "-e", "vi", "/home/user/a b.txt"]


async def test_requests_are_answered_in_parallel(guest_of: GuestMaker) -> None:
    both = threading.Barrier(2, timeout=10)

    def meet(_: Request) -> Reply:
        both.wait()
        return Reply("Linux")

    guest = guest_of(meet)
    assert await asyncio.gather(guest.platform(), guest.platform()) == ["Linux", "Linux"]
