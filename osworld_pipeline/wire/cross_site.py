"""Whether a request comes from a program of this machine or from a page of the server itself, and not from a page of
another site that is open in a browser of this machine."""

import ipaddress
from collections.abc import Mapping


def is_loopback(host: str) -> bool:
    """A name or an address of this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_from_here(headers: Mapping[bytes, bytes], *, allows_links: bool = False) -> bool:
    """Sent to a name of this machine, by a program or by a page of this very server. Browsers always name a host.

    A server without a token answers on loopback, where any page that is open in a browser of this machine reaches it:
    by the address itself, or by a name of the page's own site that points here. `allows_links`: as in `is_own_page`.
    """
    host = headers.get(b"host", b"localhost")
    name = host.rpartition(b"]")[0].removeprefix(b"[") if host.startswith(b"[") else host.partition(b":")[0]
    return (
        is_loopback(name.decode("latin-1").lower())
        and is_own_page(headers, allows_links=allows_links)
        and headers.get(b"origin", b"http://" + host) == b"http://" + host
    )


def is_own_page(headers: Mapping[bytes, bytes], *, allows_links: bool = False) -> bool:
    """No browser says that a page of another site sent it. `allows_links`: a link there, which a user follows to a
    page of ours, is answered: what it shows stays out of the other page's reach."""
    if allows_links and (headers.get(b"sec-fetch-mode"), headers.get(b"sec-fetch-dest")) == (b"navigate", b"document"):
        return True
    return headers.get(b"sec-fetch-site", b"none") in (b"same-origin", b"none")
