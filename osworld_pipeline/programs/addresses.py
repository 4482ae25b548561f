"""How programs name the address of a server."""

import os


def url_at(host: str, port: int | str, *, scheme: str = "http") -> str:
    """The URL for programs of this machine."""
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)  # noqa: S104
    return f"{scheme}://{shown}:{port}"


def ready_message(url: str) -> dict[str, str | int]:
    """The message that a server writes for programs when it is ready, to its ready file and with --json to standard
    output: its URL and the id of this process."""
    return {"url": url, "pid": os.getpid()}
