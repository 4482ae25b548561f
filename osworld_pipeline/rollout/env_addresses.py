"""Addresses that stand for several env servers. They are resolved again and again during a run, because the servers
behind them come and go."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from osworld_pipeline.errors import EnvServerError

DNS_SCHEME = "dns+http"
"""`dns+http://NAME:PORT`: every address of a host name."""
RAY_SCHEME = "ray+http"
"""`ray+http://NAME`: the servers that a Ray actor of that name keeps running. Its method `urls` returns them."""
RAY_NAMESPACE = "osworld-desktops"

Lookup = Callable[[], Awaitable[Sequence[str]]]
"""The base URLs of the servers at present. Raises EnvServerError if it cannot be known at present."""
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""The addresses of a host name. Raises OSError."""


async def resolve_name(host: str, port: int) -> Sequence[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return sorted({str(address[0]) for *_, address in found})


def split_addresses(given: str | Sequence[str]) -> tuple[str, ...]:
    """The addresses of a comma-separated string, or of several, once each."""
    parts = [given] if isinstance(given, str) else given
    urls = (url.strip().rstrip("/") for part in parts for url in part.split(","))
    return tuple(dict.fromkeys(url for url in urls if url))


def lookup_of(address: str, resolve: Resolve = resolve_name) -> Lookup | None:
    """None for the URL of one server. Raises EnvServerError: the address is not valid."""
    if address.startswith("dns+"):
        return _dns_lookup(address, resolve)
    if is_final(address):
        return _ray_lookup(address.removeprefix(f"{RAY_SCHEME}://"))
    return None


def is_final(address: str) -> bool:
    """Whether a server that leaves this address has ended. A server that leaves a host name may still be draining."""
    return address.startswith(f"{RAY_SCHEME}://")


def _dns_lookup(address: str, resolve: Resolve) -> Lookup:
    host, port = _host_and_port(address)

    async def look_up() -> Sequence[str]:
        try:
            return [_url(ip, port) for ip in await resolve(host, port)]
        except OSError as error:
            raise EnvServerError(str(error) or type(error).__name__) from error

    return look_up


def _ray_lookup(name: str) -> Lookup:
    async def look_up() -> Sequence[str]:
        import ray
        from ray.exceptions import RayError

        try:
            keeper: Any = ray.get_actor(name, namespace=RAY_NAMESPACE)
            return await keeper.urls.remote()
        except (ValueError, RayError) as error:
            raise EnvServerError(str(error).strip().splitlines()[0]) from error

    return look_up


def _host_and_port(address: str) -> tuple[str, int]:
    with suppress(ValueError):
        parts = urlsplit(address)
        if parts.scheme == DNS_SCHEME and parts.hostname and parts.port and not parts.path.strip("/"):
            return parts.hostname, parts.port
    raise EnvServerError(f"the address of env servers by name must be {DNS_SCHEME}://NAME:PORT, not {address!r}")


def _url(ip: str, port: int) -> str:
    return f"http://[{ip}]:{port}" if ":" in ip else f"http://{ip}:{port}"
