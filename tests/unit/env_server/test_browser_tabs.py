"""The browser's tabs, through the program that runs in a guest, against a debugging port that behaves as Chromium's."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

import pytest

from env_server.driving import browser
from osworld_pipeline.errors import ReplicaError, SetupError
from osworld_pipeline.task_schema.context import CommandResult


class Chromium(ThreadingHTTPServer):
    """Lists its tabs by last use, the latest first; a new tab has no address at first, as in a real browser."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.num_opened = 0
        self.tabs: list[dict[str, str]] = []
        self.add("chrome://newtab/")

    def add(self, url: str, kind: str = "page") -> dict[str, str]:
        self.num_opened += 1
        tab = {"id": f"tab-{self.num_opened}", "type": kind, "title": "", "url": url}
        self.tabs.insert(0, tab)
        return tab


class Handler(BaseHTTPRequestHandler):
    server: Chromium  # pyright: ignore[reportIncompatibleVariableOverride]

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        if self.path.startswith("/json/close/"):
            self.server.tabs = [tab for tab in self.server.tabs if tab["id"] != self.path.removeprefix("/json/close/")]
        self.answer(json.dumps(self.server.tabs))
        for tab in self.server.tabs:
            tab["url"] = tab.get("next", tab["url"])

    def do_PUT(self) -> None:
        tab = self.server.add("")
        tab["next"] = unquote(self.path.removeprefix("/json/new?"))
        self.answer(json.dumps(tab))

    def answer(self, text: str) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())


@pytest.fixture
def chromium() -> Iterator[Chromium]:
    with Chromium() as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


class Guest:
    """Runs the given commands on this machine, with other ports and a shorter time limit."""

    def __init__(self, *ports: int, output: str | None = None) -> None:
        self.ports, self.output = ports, output

    async def execute(self, command: list[str], *, timeout_s: float) -> CommandResult:
        order = json.loads(command[3]) | {"ports": self.ports, "limit_s": 0.3}
        argv = [sys.executable, *command[1:3], json.dumps(order)]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout_s, check=False)  # noqa: ASYNC221
        return CommandResult(
            status="success", output=self.output or done.stdout, error=done.stderr, returncode=done.returncode
        )


def guest_of(*chromiums: Chromium, output: str | None = None) -> Any:
    return Guest(*(server.server_address[1] for server in chromiums), output=output)


def urls(tabs: list[dict[str, str]]) -> list[str]:
    return [tab["url"] for tab in tabs]


async def test_opened_tabs_replace_the_one_the_browser_started_with(chromium: Chromium) -> None:
    chromium.add("chrome://omnibox", kind="browser_ui")
    wanted = ["https://example.org/a?b=1&c=%20d#e", "file:///home/user/ü.html"]
    assert urls(await browser.open_tabs(guest_of(chromium), wanted)) == wanted[::-1]
    assert urls(await browser.list_tabs(guest_of(chromium))) == wanted[::-1]


async def test_an_empty_list_of_addresses_opens_nothing_and_calls_no_browser(chromium: Chromium) -> None:
    assert await browser.open_tabs(guest_of(), []) == []
    assert chromium.num_opened == 1


async def test_one_tab_is_closed_for_each_address_that_is_open(chromium: Chromium) -> None:
    for url in ("https://www.example.org/", "https://example.org", "https://example.org/b"):
        chromium.add(url)
    left = await browser.close_tabs(guest_of(chromium), ["https://example.org", "https://nowhere.test"])
    assert urls(left) == ["https://example.org/b", "https://www.example.org/", "chrome://newtab/"]


async def test_a_desktop_without_a_browser_is_a_set_up_error_that_names_the_port(chromium: Chromium) -> None:
    chromium.shutdown()
    chromium.server_close()
    with pytest.raises(SetupError, match=rf"no browser answers on port {chromium.server_address[1]} of the desktop"):
        await browser.open_tabs(guest_of(chromium), ["https://example.org"])


async def test_an_invalid_list_of_tabs_is_a_replica_error(chromium: Chromium) -> None:
    with pytest.raises(ReplicaError, match="an invalid list of tabs"):
        await browser.list_tabs(guest_of(chromium, output="nonsense"))


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ("https://www.example.org/", "https://example.org", True),
        ("example.org/a", "http://EXAMPLE.org/a", True),
        ("https://example.org/a", "https://example.org/A", False),
        ("https://example.org/a?b=1", "https://example.org/a?b=2", False),
        ("https://example.org/a#b", "https://example.org/a", False),
        ("http://example.org", "https://example.org", False),
    ],
)
def test_two_forms_of_one_address_are_equal_and_other_addresses_are_not(first: str, second: str, same: bool) -> None:
    assert browser.same_address(first, second) is same
