"""Set-up verbs on a desktop in memory, and what they refuse."""

import base64
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_desktops import FakeDesktop

from env_server.driving.download import Downloader
from env_server.driving.setup import run_verbs, setup_context
from env_server.evaluators.episode_cache import EpisodeCache
from env_server.settings import TaskLimits
from osworld_pipeline.errors import ReplicaError, SetupError, TaskError
from osworld_pipeline.task_schema.reading import check_verbs

Answers = dict[str, httpx.Response]


class NoBrowser(dict[str, Any]):
    """Answers every command as if the debugging port were closed."""

    def get(self, key: object, default: object = None) -> Any:
        return 200, {"status": "success", "output": "", "error": "no browser answers", "returncode": 1}


def verb(name: str, **parameters: Any) -> dict[str, Any]:
    return {"type": name, "parameters": parameters}


async def run(
    desktop: FakeDesktop,
    *verbs: dict[str, Any],
    limits: TaskLimits | None = None,
    web: Answers | None = None,
    is_before_grading: bool = False,
) -> EpisodeCache:
    def answer(request: httpx.Request) -> httpx.Response:
        return (web or {}).get(str(request.url), httpx.Response(404))

    cache, limits = EpisodeCache(), limits or TaskLimits(download_hosts=("files.test",))
    downloader = Downloader(limits, transport=httpx.MockTransport(answer))
    context = setup_context(desktop.guest, cache, downloader, limits=limits, screen=(800, 600))
    try:
        await run_verbs(verbs, context, is_before_grading=is_before_grading)
    finally:
        await downloader.close()
    return cache


async def test_verbs_run_in_order() -> None:
    desktop = FakeDesktop("d")
    await run(
        desktop, verb("execute", command=["a", "b"]), verb("command", command="c"), verb("launch", command="xterm -e d")
    )
    assert desktop.executed == [["a", "b"], "c"]
    assert desktop.launched == [["xterm", "-e", "d"]]


async def test_placeholders_of_screen_and_password_are_filled_in() -> None:
    desktop = FakeDesktop("d")
    command = "{SCREEN_WIDTH}x{SCREEN_HEIGHT} {SCREEN_WIDTH_HALF},{SCREEN_HEIGHT_HALF} {CLIENT_PASSWORD}"
    await run(desktop, verb("execute", command=command, shell=True))
    assert desktop.executed == ["800x600 400,300 password"]


async def test_exit_status_of_a_command_does_not_matter_but_one_that_cannot_run_does() -> None:
    desktop = FakeDesktop("d")
    desktop.commands["a"] = (200, {"status": "success", "output": "", "error": "bad", "returncode": 3})
    await run(desktop, verb("execute", command="a"))
    desktop.commands["a"] = (500, {"status": "error", "message": "no such program: a"})
    with pytest.raises(SetupError, match=r"set-up verb 1 \(execute\) failed: .*no such program: a"):
        await run(desktop, verb("execute", command="a"))


async def test_output_is_kept_for_the_grader() -> None:
    desktop = FakeDesktop("d")
    desktop.commands["a"] = (200, {"status": "success", "output": "out", "error": "err", "returncode": 0})
    cache = await run(desktop, verb("execute", command="a", stdout="o.txt", stderr="e.txt"))
    kept = [cache.get(name) for name in ("o.txt", "e.txt")]
    assert [file.data if file else None for file in kept] == [b"out", b"err"]


async def test_until_repeats_a_command_until_its_condition_holds_and_gives_up_if_it_cannot_run() -> None:
    desktop = FakeDesktop("d")
    success = {"status": "success", "error": "", "returncode": 0}
    desktop.commands["a"] = (200, {**success, "output": "ready"})
    await run(desktop, verb("execute", command="a", until={"stdout": "ready"}))
    await run(desktop, verb("execute", command="a", until={"returncode": 0}))
    desktop.commands["a"] = (500, {"status": "error", "message": "gone"})
    with pytest.raises(SetupError, match="did not reach"):
        await run(desktop, verb("execute", command="a", until={"stdout": "ready"}))
    assert len(desktop.executed) == 2 + 5


async def test_missing_window_is_skipped_as_in_osworld() -> None:
    desktop = FakeDesktop("d")
    await run(desktop, verb("activate_window", window_name="Nowhere"), verb("execute", command="a"))
    assert desktop.executed == ["a"]


async def test_program_that_does_not_start_fails_the_set_up_but_not_the_grading() -> None:
    desktop = FakeDesktop("d")
    wallpaper = verb("change_wallpaper", path="/nowhere.png")
    with pytest.raises(SetupError, match="change_wallpaper"):
        await run(desktop, wallpaper)
    await run(desktop, wallpaper, is_before_grading=True)


async def test_a_missing_browser_fails_the_set_up_but_not_the_grading() -> None:
    desktop = FakeDesktop("d")
    desktop.commands = NoBrowser()
    tabs = verb("chrome_open_tabs", urls_to_open=["https://a.test"])
    with pytest.raises(SetupError, match=r"\(chrome_open_tabs\) failed: the browser's tabs cannot be reached"):
        await run(desktop, tabs)
    await run(desktop, tabs, is_before_grading=True)


async def test_desktop_that_dies_during_set_up_is_a_replica_error() -> None:
    desktop = FakeDesktop("d")
    desktop.alive = False
    with pytest.raises(ReplicaError):
        await run(desktop, verb("activate_window", window_name="a"))


async def test_sleep_is_bounded() -> None:
    with pytest.raises(SetupError, match="a sleep must be 0 to 60 seconds, not 61"):
        await run(FakeDesktop("d"), verb("sleep", seconds=61))


WRONG = [
    verb("execute"), verb("execute", command=""), verb("execute", command=[1]), verb("execute", cmd="a"),
    verb("open", path=""), verb("launch", command=[]), verb("download", files=["a"]),
    verb("download", files=[{"url": "http://files.test/a"}]), verb("upload_file", files=[{"content": "a"}]),
    verb("chrome_open_tabs", urls_to_open="https://a.test"), verb("chrome_close_tabs", urls_to_close=[1]),
    verb("chrome_open_tabs"), verb("sleep", seconds="1"), verb("sleep", seconds=-1), verb("sleep", seconds=True),
    verb("sleep", seconds=None),
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_parameters_are_refused_before_a_desktop_is_taken(wrong: dict[str, Any]) -> None:
    with pytest.raises(TaskError, match=rf"set-up verb 1 \({wrong['type']}\)"):
        check_verbs("t", [wrong])


@pytest.mark.parametrize(
    "wrong",
    [
        verb("execute", command="a", until={"stdout": 1}),
        verb("download", files=[{"url": "", "path": "/a"}]),
        verb("upload_file", files=[{"path": "/a", "content": 1, "local_path": "a"}]),
        verb("upload_file", files=[{"path": "/a", "content_base64": "a"}]),
    ],
)
async def test_values_that_fail_only_when_they_are_used_are_a_set_up_error_that_names_the_verb(
    wrong: dict[str, Any],
) -> None:
    check_verbs("t", [wrong])
    with pytest.raises(SetupError, match=rf"set-up verb 1 \({wrong['type']}\)"):
        await run(FakeDesktop("d"), wrong)


@pytest.mark.parametrize(
    ("verbs", "sentence"),
    [
        ("execute", "not a list"),
        ([{"parameters": {}}], "not an object with a 'type'"),
        ([{"type": "googledrive"}], "set-up verb 'googledrive', which only OSWorld's desktop-env has; serve it with"),
        (
            [{"type": "wait"}],
            "set-up verb 'wait', which does not exist: there are activate_window, .*, sleep, upload_file",
        ),
        ([{"type": "excute"}], "set-up verb 'excute', which does not exist: did you mean execute"),
        ([{"type": "execute", "parameters": []}], "parameters of set-up verb 1"),
    ],
)
def test_verbs_that_this_server_does_not_have_are_refused_beforehand(verbs: object, sentence: str) -> None:
    with pytest.raises(TaskError, match=sentence):
        check_verbs("t", verbs)


def test_task_without_config_has_no_verbs() -> None:
    assert check_verbs("t", None) == ()


def download(url: str) -> dict[str, Any]:
    return verb("download", files=[{"url": url, "path": "/home/user/a"}])


async def test_download_is_uploaded_to_the_guest() -> None:
    desktop = FakeDesktop("d")
    web = {
        "http://files.test/a": httpx.Response(302, headers={"location": "/b"}),
        "http://files.test/b": httpx.Response(200, content=b"the content"),
    }
    await run(desktop, download("http://files.test/a"), web=web)
    assert b"the content" in desktop.files["uploaded"]
    assert b"/home/user/a" in desktop.files["uploaded"]


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("http://other.test/a", "other.test are not allowed"),
        ("http://files.test.evil.test/a", "not allowed"),
        ("http://files.test/away", "169.254.169.254 are not allowed"),
        ("file:///etc/passwd", "not a web address"),
        ("http://files.test/missing", "answered 404"),
        ("http://files.test/large", "larger than 10 bytes"),
        ("http://files.test/round", "redirects"),
    ],
)
async def test_download_from_a_host_that_is_not_allowed_or_too_large_is_refused(url: str, sentence: str) -> None:
    web = {
        "http://files.test/away": httpx.Response(302, headers={"location": "http://169.254.169.254/secret"}),
        "http://files.test/large": httpx.Response(200, content=b"x" * 11),
        "http://files.test/round": httpx.Response(302, headers={"location": "/round"}),
    }
    limits = TaskLimits(download_hosts=("files.test",), download_max_bytes=10)
    desktop = FakeDesktop("d")
    with pytest.raises(SetupError, match=sentence):
        await run(desktop, download(url), web=web, limits=limits)
    assert desktop.files == {}


def upload(**file: str) -> dict[str, Any]:
    return verb("upload_file", files=[{"path": "/home/user/a", **file}])


async def test_upload_takes_content_from_the_task_or_from_the_upload_folder(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("from the folder")
    limits = TaskLimits(upload_root=tmp_path)
    desktop = FakeDesktop("d")
    encoded = base64.b64encode(b"\x00\xff").decode()
    for file, content in (
        ({"content": "from the task"}, b"from the task"),
        ({"content_base64": encoded}, b"\x00\xff"),
        ({"local_path": "a.txt"}, b"from the folder"),
    ):
        await run(desktop, upload(**file), limits=limits)
        assert content in desktop.files["uploaded"]


async def test_upload_reads_nothing_else_of_the_server(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "secret").write_text("x")
    (root / "link").symlink_to(tmp_path / "secret")
    limits = TaskLimits(upload_root=root)
    for local_path in ("../secret", "/etc/passwd", "link", "missing", ""):
        with pytest.raises(SetupError):
            await run(FakeDesktop("d"), upload(local_path=local_path), limits=limits)
    with pytest.raises(SetupError, match="--upload-root"):
        await run(FakeDesktop("d"), upload(local_path="a.txt"))
