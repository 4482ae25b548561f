"""Checks whether a request comes from a local program or from a page of the server itself, instead of a page of another
site in a browser on this machine."""

import ipaddress
from collections.abc import Mapping


def is_loopback(host: str) -> bool:
    """Whether a name or an address is that of this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_from_here(headers: Mapping[bytes, bytes], *, allows_links: bool = False) -> bool:
    """Whether the request was sent to a loopback name or address, by a local program or by a page of this server.
    Browsers always send a host.

    A server without a token answers on loopback, which any page in a browser on this machine can reach: by the address,
    or by a name of the page's own site that resolves to it. `allows_links`: as in `is_own_page`.
    """
    host = headers.get(b"host", b"localhost")
    name = host.rpartition(b"]")[0].removeprefix(b"[") if host.startswith(b"[") else host.partition(b":")[0]
    return (
        is_loopback(name.decode("latin-1").lower())
        and is_own_page(headers, allows_links=allows_links)
        and headers.get(b"origin", b"http://" + host) == b"http://" + host
    )


def is_from_program(headers: Mapping[bytes, bytes]) -> bool:
    """Whether no browser marks the request as its own. If a list of addresses controls access, a page in a browser on
    an allowed machine could otherwise reach the port by a name of the page's own site."""
    marks = (b"origin", b"sec-fetch-site", b"sec-fetch-mode")
    return not any(mark in headers for mark in marks) and not headers.get(b"user-agent", b"").startswith(b"Mozilla/")


def is_own_page(headers: Mapping[bytes, bytes], *, allows_links: bool = False) -> bool:
    """Whether no browser marks the request as sent by a page of another site. `allows_links`: also accepts that a user
    follows a link on another site to one of our pages, because the other site cannot read the result."""
    if allows_links and (headers.get(b"sec-fetch-mode"), headers.get(b"sec-fetch-dest")) == (b"navigate", b"document"):
        return True
    return headers.get(b"sec-fetch-site", b"none") in (b"same-origin", b"none")
