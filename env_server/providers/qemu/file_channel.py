"""Reads a guest's files from outside its desktop: an HTTP server in the guest answers GET with the bytes of the file at
the URL's path, as in the Windows example. The server runs outside of the session that the agent sees, so closing
windows does not end it."""

import asyncio
from urllib.parse import quote

import httpx

from env_server.guest_client import FileTooLargeError, http_client_over_unix_socket
from osworld_pipeline.errors import ReplicaError

CHANNEL_PORT = 9999
READY_PATH = "/"
READY_ANSWER = b"osworld-files\n"
MAX_FILE_BYTES = 256 * 1024 * 1024
_READY_LIMIT_S = 5.0


class FileChannel:
    """`socket_path` is the socket to the guest's port; `name` is the replica's, for messages."""

    def __init__(self, socket_path: str, *, name: str, http: httpx.AsyncClient | None = None) -> None:
        self._http = http or http_client_over_unix_socket(socket_path)
        self._name = name

    async def is_ready(self) -> bool:
        try:
            async with asyncio.timeout(_READY_LIMIT_S):
                answer = await self._http.get(READY_PATH, timeout=_READY_LIMIT_S)
        except (TimeoutError, httpx.HTTPError):
            return False
        return answer.status_code == 200 and answer.content == READY_ANSWER

    async def read(self, path: str, *, max_bytes: int = MAX_FILE_BYTES, timeout_s: float) -> bytes | None:
        """The bytes of a file; None if it does not exist or cannot be read.

        Raises:
            ReplicaError: the server does not answer, is gone, or sends any other status.
            FileTooLargeError: it is larger than `max_bytes`.
        """
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._http.stream("GET", _url_path(path), timeout=timeout_s) as answer,
            ):
                if answer.status_code in (403, 404):
                    return None
                if answer.status_code != 200:
                    raise ReplicaError(
                        f"the file server of {self._name} answered {path} with {answer.status_code}; replace the "
                        "replica"
                    )
                data = bytearray()
                async for piece in answer.aiter_bytes():
                    data += piece
                    if len(data) > max_bytes:
                        raise FileTooLargeError(f"{path} on {self._name} is larger than {max_bytes} bytes")
                return bytes(data)
        except TimeoutError as error:
            raise ReplicaError(
                f"the file server of {self._name} did not answer within {timeout_s:g} s; replace the replica"
            ) from error
        except httpx.HTTPError as error:
            raise ReplicaError(
                f"the file server of {self._name} cannot be reached ({type(error).__name__}); replace the replica"
            ) from error

    async def close(self) -> None:
        await self._http.aclose()


def _url_path(path: str) -> str:
    """`C:\\a b.txt` as `/C%3A/a%20b.txt`; an absolute path keeps its slash."""
    return "/" + quote(path.replace("\\", "/").lstrip("/"), safe="/")
