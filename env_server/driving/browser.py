"""Tabs of the browser inside a desktop. Its debugging port is reached from inside, by a small program run in the guest,
because a desktop need not have a network to its host."""

import json
from collections.abc import Sequence
from urllib.parse import urlsplit, urlunsplit

from env_server.guest_client import GuestClient
from osworld_pipeline.errors import ReplicaError, SetupError

DEBUGGING_PORTS = (1337, 9222)
"""The port that OSWorld's tasks start the browser with, and the port that they forward it to."""
BROWSER_LIMIT_S = 30.0
"""Time for a browser that has just been started to answer."""
SETTLE_S = 5.0
"""Time for a new tab to have its address, and for a closed one to be gone."""
CALL_LIMIT_S = 20.0

_PROGRAM = """
import json, sys, time, urllib.error, urllib.parse, urllib.request
order = json.loads(sys.argv[1])
web = urllib.request.build_opener(urllib.request.ProxyHandler({}))

def ask(port, path, method="GET"):
    request = urllib.request.Request(f"http://127.0.0.1:{port}/json/{path}", method=method)
    return web.open(request, timeout=10).read().decode()

def pages():
    return [page for page in json.loads(ask(port, "list")) if page.get("type") == "page"]

until, port, found = time.monotonic() + order["limit_s"], None, []
while not found:
    for port in order["ports"]:
        try:
            found = pages()
        except (OSError, ValueError):
            continue
        if found or not order["open"]:
            break
    else:
        if time.monotonic() > until:
            sys.exit(f"no browser answers on port {' or '.join(map(str, order['ports']))} of the desktop")
        time.sleep(0.1)
        continue
    break
for index, url in enumerate(order["open"]):
    ask(port, "new?" + urllib.parse.quote(url, safe=""), "PUT")
    if index == 0:
        ask(port, "close/" + found[-1]["id"])
for tab in order["close"]:
    ask(port, "close/" + tab)
until = time.monotonic() + order["settle_s"]  # both take a moment to show
while time.monotonic() < until:
    found = pages()
    if all(page.get("url") for page in found) and not {page["id"] for page in found} & set(order["close"]):
        break
    time.sleep(0.05)
print(json.dumps([{key: page.get(key, "") for key in ("id", "title", "url")} for page in found]))
"""


async def list_tabs(guest: GuestClient) -> list[dict[str, str]]:
    """Each tab's `id`, `title` and `url`, the last used first.

    Raises:
        SetupError: no browser answers in the desktop.
    """
    return await _order(guest)


async def open_tabs(guest: GuestClient, urls: Sequence[str]) -> list[dict[str, str]]:
    """Opens one tab per URL and closes the tab that the browser started with, as OSWorld does. Returns all tabs."""
    return await _order(guest, urls=urls) if urls else []


async def close_tabs(guest: GuestClient, urls: Sequence[str]) -> list[dict[str, str]]:
    """For each URL that is open in a tab, closes one such tab. Returns the remaining tabs."""
    tabs = await list_tabs(guest)
    closing: list[str] = []
    for url in urls:
        for tab in tabs:
            if tab["id"] not in closing and same_address(tab["url"], url):
                closing.append(tab["id"])
                break
    return await _order(guest, ids=closing) if closing else tabs


def same_address(first: str, second: str) -> bool:
    """Whether two addresses lead to the same page, ignoring `www.`, a missing http:// and the slash after the host."""
    return _plain(first) == _plain(second)


def _plain(url: str) -> str:
    parts = urlsplit(url if "://" in url else f"http://{url}")
    host = parts.netloc.lower().removeprefix("www.")
    path = "" if parts.path == "/" else parts.path
    return urlunsplit((parts.scheme.lower(), host, path, parts.query, parts.fragment))


async def _order(guest: GuestClient, *, urls: Sequence[str] = (), ids: Sequence[str] = ()) -> list[dict[str, str]]:
    limit_s = BROWSER_LIMIT_S
    order = {"open": list(urls), "close": list(ids), "ports": DEBUGGING_PORTS, "limit_s": limit_s, "settle_s": SETTLE_S}
    timeout_s = limit_s + SETTLE_S + CALL_LIMIT_S
    result = await guest.execute(["python", "-c", _PROGRAM, json.dumps(order)], timeout_s=timeout_s)
    if result.status != "success" or result.returncode != 0:
        last = (result.error.strip().splitlines() or ["no message"])[-1]
        raise SetupError(f"the browser's tabs cannot be reached: {last[:200]}")
    try:
        return [dict(tab) for tab in json.loads(result.output)]
    except (ValueError, TypeError) as error:
        raise ReplicaError(f"the guest sent an invalid list of tabs: {result.output[:80]!r}") from error
