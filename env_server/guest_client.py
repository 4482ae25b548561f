"""An async client of OSWorld's guest protocol, over a Unix socket or TCP. Every call has a limit in seconds and every
answer one in bytes. A guest that does not answer, is gone, or sends invalid or endless answers is a ReplicaError; a
set-up verb that it refuses is a SetupError."""

import asyncio
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import httpx

from env_server.foreign_input import pyautogui_program
from osworld_pipeline.domain.digest import Json
from osworld_pipeline.errors import ActionParseError, EvaluatorError, ReplicaError, SetupError, TamperingError
from osworld_pipeline.task_schema.context import CommandResult
from osworld_pipeline.wire import ImageFormat

DEFAULT_TIMEOUT_S = 30.0
WINDOW_TIMEOUT_S = 60.0
"""The guest itself waits for a window, in an emulated machine for most of this time."""
_NO_CERTIFICATES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""The context of connections without TLS: httpx would load every certificate of the machine for each client, in 50 ms
or more."""
TRANSFER_MARGIN_S = 10.0
"""Time for a command's answer beyond the command's own limit."""
TAMPERED: Mapping[int, str] = {
    409: "override files that are run by",
    410: "have disabled the services behind",
    507: "have left no space or processes for",
}
"""Statuses by which our guest agent reports interference; OSWorld's guest server does not use them."""
_MIB = 1 << 20
MAX_ANSWER_BYTES = 4 * _MIB
MAX_BYTES_OF: Mapping[str, int] = {
    "/accessibility": 64 * _MIB,
    "/end_recording": 260 * _MIB,
    "/execute": 100 * _MIB,
    "/file": 260 * _MIB,
    "/list_directory": 32 * _MIB,
    "/run_bash_script": 100 * _MIB,
    "/run_python": 100 * _MIB,
    "/screenshot": 64 * _MIB,
    "/setup/execute": 100 * _MIB,
    "/wallpaper": 260 * _MIB,
}
"""Limits of longer answers: above the limits of our own guest agent, and of a command's 16 MiB encoded as JSON."""


MAX_FRAME_BYTES = 4 * _MIB
FRAMES_SILENCE_S = 15.0
"""A stream that has sent no record for this time, not even an empty one, is lost."""
JPEG_START = b"\xff\xd8\xff"


class NoFramesError(ReplicaError):
    """The guest cannot send a stream of its screen; its screenshots work."""


class FileTooLargeError(EvaluatorError):
    """The file exists but is larger than the caller's limit."""


@dataclass(frozen=True, kw_only=True)
class GuestCall:
    """One call with a pyautogui name and literal arguments: `GuestCall(name="click", args=(10, 20))`."""

    name: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None


class GuestClient:
    """The client of one guest agent. `name` is the replica's, for messages."""

    def __init__(self, http: httpx.AsyncClient, *, name: str, address: str = "") -> None:
        """`address` is where other processes reach the guest: `unix:PATH`, `http://...`, or empty if they cannot."""
        self._http, self.address = http, address
        self._name = name
        self._lacks_act = False

    @classmethod
    def over_unix_socket(cls, path: str, *, name: str) -> Self:
        return cls(http_client_over_unix_socket(path), name=name, address=f"unix:{path}")

    @classmethod
    def over_tcp(cls, base_url: str, *, name: str) -> Self:
        return cls(http_client_over_tcp(base_url), name=name, address=base_url)

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # Observation

    async def screenshot(
        self,
        image_format: ImageFormat = "png",
        *,
        quality: int | None = None,
        size: tuple[int, int] | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> bytes:
        """The encoded screen, including the mouse cursor; `quality` (1..100) applies to the lossy formats, `size` is
        the (width, height) of the result if it differs from the screen's. Foreign guests return a PNG of the whole
        screen for every request."""
        params = {} if image_format == "png" else {"format": image_format}
        if quality is not None:
            params["quality"] = str(quality)
        if size is not None:
            params |= {"width": str(size[0]), "height": str(size[1])}
        answer = await self._request("GET", "/screenshot", params=params, timeout_s=timeout_s)
        if not answer.headers.get("content-type", "").startswith("image/"):
            raise ReplicaError(f"the guest of {self._name} answered /screenshot without an image; replace the replica")
        return answer.content

    async def frames(self, *, width: int, interval_s: float) -> AsyncGenerator[bytes, None]:
        """Our extension: a JPEG of the screen, at most `width` pixels wide, and another after each change, at most one
        every `interval_s`. The stream ends after some minutes.

        Raises:
            NoFramesError: the guest has no frames.
            ReplicaError: it is gone, is silent, or sends something else.
        """
        if self._http.is_closed:
            raise ReplicaError(f"the desktop {self._name} is stopped and has no frames; start another")
        params = {"width": str(width), "interval_s": f"{interval_s:g}"}
        try:
            async with self._http.stream("GET", "/frames", params=params, timeout=FRAMES_SILENCE_S) as stream:
                if stream.status_code in (404, 405):
                    raise NoFramesError(f"the guest of {self._name} has no frames")
                if stream.status_code != 200:
                    raise ReplicaError(f"the guest of {self._name} answered /frames with {stream.status_code}")
                async for picture in self._pictures(stream):
                    yield picture
        except httpx.HTTPError as error:
            raise ReplicaError(
                f"the guest of {self._name} cannot be reached for /frames ({type(error).__name__})"
            ) from error

    async def _pictures(self, stream: httpx.Response) -> AsyncIterator[bytes]:
        """The records of a stream of frames, without the empty ones."""
        held = bytearray()
        async for part in stream.aiter_raw():
            held += part
            while len(held) >= 4:
                end = 4 + int.from_bytes(held[:4], "big")
                if end > MAX_FRAME_BYTES:
                    raise ReplicaError(f"the guest of {self._name} sent a frame of {end:,} bytes")
                if len(held) < end:
                    break
                picture = bytes(held[4:end])
                del held[:end]
                if picture and not picture.startswith(JPEG_START):
                    raise ReplicaError(f"the guest of {self._name} sent a frame that is no JPEG")
                if picture:
                    yield picture

    async def accessibility(self, *, timeout_s: float = 60.0) -> str:
        """The accessibility tree as OSWorld's XML."""
        answer = await self._request("GET", "/accessibility", timeout_s=timeout_s)
        return str(self._json(answer).get("AT") or "")

    async def terminal(self) -> str | None:
        """Text of the focused terminal, else of the last used one; None if none shows text."""
        output = self._json(await self._request("GET", "/terminal")).get("output")
        return None if output is None else str(output)

    async def platform(self) -> str:
        return (await self._request("GET", "/platform")).text.strip()

    async def cursor_position(self) -> tuple[int, int]:
        with self._understood("/cursor_position"):
            x, y = (await self._request("GET", "/cursor_position")).json()
            return int(x), int(y)

    async def screen_size(self) -> tuple[int, int]:
        """(width, height)"""
        size = self._json(await self._request("POST", "/screen_size"))
        with self._understood("/screen_size"):
            return int(size["width"]), int(size["height"])

    async def window_size(self, app_class_name: str) -> tuple[int, int] | None:
        """(width, height) of the topmost window of an application class; None if there is none."""
        answer = await self._request("POST", "/window_size", form={"app_class_name": app_class_name}, allow=(404,))
        if answer.status_code == 404:
            return None
        size = self._json(answer)
        with self._understood("/window_size"):
            return int(size["width"]), int(size["height"])

    # Input and programs

    async def act(self, calls: Sequence[GuestCall], *, settle_s: float | None = None, timeout_s: float = 60.0) -> bool:
        """Our extension: input through XTest, without running code. If the guest refuses a call, ActionParseError is
        raised and no call of the list was executed. A foreign guest without this route runs a pyautogui program
        instead.

        With `settle_s` the guest then waits until its screen has settled, at most this long and in addition to
        `timeout_s`; False if the guest cannot do that and has not waited."""
        if self._lacks_act:
            return await self._act_by_program(calls, timeout_s)
        body: dict[str, Any] = {
            "calls": [{"name": c.name, "args": list(c.args), "kwargs": dict(c.kwargs or {})} for c in calls]
        }
        if settle_s is not None:
            body["settle_s"] = settle_s
        limit_s = timeout_s + (settle_s or 0.0)
        answer = await self._request("POST", "/act", body=body, timeout_s=limit_s, allow=(400, 404, 405))
        if answer.status_code == 400:
            raise ActionParseError(_message(answer))
        if answer.status_code != 200:  # the guest lacks the route, so nothing was executed
            self._lacks_act = True
            return await self._act_by_program(calls, timeout_s)
        return settle_s is not None and "settled_s" in self._json(answer)

    async def _act_by_program(self, calls: Sequence[GuestCall], timeout_s: float) -> bool:
        """Sends the input once: input that may have been executed is not repeated."""
        if not calls:
            return False
        result = await self.execute(["python", "-c", pyautogui_program(calls)], timeout_s=timeout_s)
        if result.status != "success" or result.returncode != 0:
            raise ReplicaError(f"the guest of {self._name} failed in the middle of an action: {result.error[-300:]}")
        return False

    async def execute(
        self,
        command: str | Sequence[str],
        *,
        shell: bool = False,
        timeout_s: float = 120.0,
        setup: bool = False,
        is_graders: bool = False,
    ) -> CommandResult:
        """Runs a command in the guest as its user; a program that it leaves in the background does not delay it.

        Raises:
            TamperingError: with `is_graders`, files override the system's programs; or the desktop's programs have left
                no space or processes for the command.
        """
        body: dict[str, Json] = {"command": _argv(command), "shell": shell, "timeout": timeout_s}
        if is_graders:
            body["is_graders"] = True
        path = "/setup/execute" if setup else "/execute"
        return await self._command(path, body, timeout_s)

    async def run_python(self, code: str, *, timeout_s: float = 90.0) -> CommandResult:
        return await self._command("/run_python", {"code": code, "timeout": timeout_s}, timeout_s)

    async def run_bash_script(
        self, script: str, *, timeout_s: float = 100.0, working_dir: str | None = None
    ) -> CommandResult:
        body = {"script": script, "timeout": timeout_s, "working_dir": working_dir}
        return await self._command("/run_bash_script", body, timeout_s)

    async def launch(self, command: str | Sequence[str], *, shell: bool = False) -> None:
        """Starts a program and does not wait for it. SetupError names a missing program."""
        await self._request("POST", "/setup/launch", body={"command": _argv(command), "shell": shell})

    async def open_file(self, path: str) -> None:
        await self._request("POST", "/setup/open_file", body={"path": path}, timeout_s=WINDOW_TIMEOUT_S)

    async def activate_window(self, window_name: str, *, strict: bool = False, by_class: bool = False) -> None:
        body = {"window_name": window_name, "strict": strict, "by_class": by_class}
        await self._request("POST", "/setup/activate_window", body=body, timeout_s=WINDOW_TIMEOUT_S)

    async def close_window(self, window_name: str, *, strict: bool = False, by_class: bool = False) -> None:
        body = {"window_name": window_name, "strict": strict, "by_class": by_class}
        await self._request("POST", "/setup/close_window", body=body, timeout_s=WINDOW_TIMEOUT_S)

    async def change_wallpaper(self, path: str) -> None:
        await self._request("POST", "/setup/change_wallpaper", body={"path": path})

    # Files

    async def upload(self, path: str, data: bytes, *, timeout_s: float = 120.0) -> None:
        """Writes `data` to `path` in the guest and creates missing folders."""
        files = {"file_path": (None, path), "file_data": ("file", data, "application/octet-stream")}
        await self._request("POST", "/setup/upload", files=files, timeout_s=timeout_s)

    async def download_file(self, url: str, path: str, *, timeout_s: float = 300.0) -> None:
        """Lets the guest download a URL itself, which needs a network inside. SetupError if it cannot."""
        await self._request("POST", "/setup/download_file", body={"url": url, "path": path}, timeout_s=timeout_s)

    async def file(
        self, path: str, *, max_bytes: int = MAX_BYTES_OF["/file"], timeout_s: float = 120.0
    ) -> bytes | None:
        """The bytes of a file; None if it does not exist, or the desktop's user cannot read it.

        Raises:
            FileTooLargeError: it is larger than `max_bytes`, or than the guest's own limit.
        """
        allow = (400, 403, 404, 413)
        answer = await self._request(
            "POST", "/file", form={"file_path": path}, timeout_s=timeout_s, allow=allow, max_bytes=max_bytes
        )
        if answer.status_code == 413:
            raise FileTooLargeError(f"the guest of {self._name} refuses to send {path}: {_message(answer)}")
        return answer.content if answer.status_code == 200 else None

    async def list_directory(self, path: str) -> dict[str, Any] | None:
        """OSWorld's tree `{type, name, children}`; None if `path` is no folder, is not readable or has too many
        entries."""
        answer = await self._request("POST", "/list_directory", body={"path": path}, allow=(400, 403, 404))
        if answer.status_code != 200:
            return None
        tree = self._json(answer).get("directory_tree")
        if not isinstance(tree, dict | None):
            raise ReplicaError(f"the guest of {self._name} sent no tree for /list_directory; replace the replica")
        return tree

    async def desktop_path(self) -> str:
        answer = self._json(await self._request("POST", "/desktop_path"))
        with self._understood("/desktop_path"):
            return str(answer["desktop_path"])

    async def wallpaper(self, *, max_bytes: int = MAX_BYTES_OF["/wallpaper"]) -> bytes | None:
        """The bytes of the wallpaper's file; None if there is none, or it is larger than the guest's own limit.

        Raises:
            FileTooLargeError: it is larger than `max_bytes`.
        """
        allow = (403, 404, 413)
        answer = await self._request("POST", "/wallpaper", allow=allow, max_bytes=max_bytes)
        return answer.content if answer.status_code == 200 else None

    # Recording

    async def start_recording(self) -> None:
        """SetupError if the desktop cannot record (it has no ffmpeg), or already records."""
        self._recorded(await self._request("POST", "/start_recording", allow=(400, 500, 501)))

    async def end_recording(self, *, timeout_s: float = 120.0) -> bytes:
        """The video since `start_recording`, an MP4. SetupError if there is none."""
        return self._recorded(
            await self._request("POST", "/end_recording", timeout_s=timeout_s, allow=(400, 413, 500))
        ).content

    def _recorded(self, answer: httpx.Response) -> httpx.Response:
        if answer.status_code != 200:
            raise SetupError(f"the guest of {self._name} cannot record: {_message(answer)}")
        return answer

    # Transport

    async def _command(self, path: str, body: Mapping[str, Json], timeout_s: float) -> CommandResult:
        limit_s = timeout_s + TRANSFER_MARGIN_S
        answer = await self._request("POST", path, body=body, timeout_s=limit_s, allow=(400, 408, 500))
        fields = self._json(answer)
        status = "success" if answer.status_code == 200 else "error"
        with self._understood(path):
            return CommandResult(
                status=str(fields.get("status", status)),
                output=str(fields.get("output") or ""),
                error=str(fields.get("error") or (fields.get("message") if answer.status_code != 200 else "") or ""),
                returncode=int(fields.get("returncode", -1 if answer.status_code != 200 else 0)),
            )

    async def _request(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        form: Mapping[str, str] | None = None,
        files: Mapping[str, Any] | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        allow: tuple[int, ...] = (),
        max_bytes: int | None = None,
    ) -> httpx.Response:
        """`max_bytes`: FileTooLargeError for a longer answer; without it the route's limit, and ReplicaError."""
        if self._http.is_closed:
            raise ReplicaError(f"the desktop {self._name} is stopped and cannot serve {path}; start another")
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._http.stream(
                    method, path, params=params, json=body, data=form, files=files, timeout=timeout_s
                ) as stream,
            ):
                answer = await self._read(stream, path, max_bytes)
        except (TimeoutError, httpx.TimeoutException) as error:
            raise ReplicaError(
                f"the guest of {self._name} did not answer {path} within {timeout_s:g} s; replace the replica"
            ) from error
        except httpx.HTTPError as error:
            raise ReplicaError(
                f"the guest of {self._name} cannot be reached for {path} ({type(error).__name__}); replace the replica"
            ) from error
        if answer.status_code in TAMPERED:
            way = TAMPERED[answer.status_code]
            raise TamperingError(f"the programs of {self._name} {way} {path}: {_message(answer)}")
        if answer.status_code != 200 and answer.status_code not in allow:
            kind = SetupError if path.startswith("/setup/") else ReplicaError
            raise kind(f"the guest of {self._name} answered {path} with {answer.status_code}: {_message(answer)}")
        return answer

    async def _read(self, stream: httpx.Response, path: str, max_bytes: int | None) -> httpx.Response:
        """The whole answer as the guest sent it, without decompression."""
        limit = MAX_BYTES_OF.get(path, MAX_ANSWER_BYTES) if max_bytes is None else max_bytes
        if stream.headers.get("content-encoding", "identity").lower() != "identity":
            raise ReplicaError(f"the guest of {self._name} compressed its answer to {path}; replace the replica")
        parts, num_bytes = list[bytes](), 0
        async for part in stream.aiter_bytes():
            num_bytes += len(part)
            if num_bytes > limit:
                sentence = f"the guest of {self._name} answered {path} with more than {limit} bytes"
                if max_bytes is None:
                    raise ReplicaError(f"{sentence}; replace the replica")
                raise FileTooLargeError(sentence)
            parts.append(part)
        return httpx.Response(
            stream.status_code, headers=stream.headers, content=b"".join(parts), request=stream.request
        )

    def _json(self, answer: httpx.Response) -> dict[str, Any]:
        with self._understood(answer.request.url.path):
            fields = answer.json()
        return fields if isinstance(fields, dict) else {"output": fields}

    @contextmanager
    def _understood(self, path: str) -> Iterator[None]:
        """An answer of another shape than the route's is the guest's fault."""
        try:
            yield
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            raise ReplicaError(
                f"the guest of {self._name} sent an invalid answer to {path} "
                f"({type(error).__name__}); replace the replica"
            ) from error


def http_client_over_unix_socket(path: str) -> httpx.AsyncClient:
    return _http_client("http://guest", httpx.AsyncHTTPTransport(uds=path, verify=_NO_CERTIFICATES))


def http_client_over_tcp(base_url: str) -> httpx.AsyncClient:
    verify = True if base_url.startswith("https:") else _NO_CERTIFICATES
    return _http_client(base_url, httpx.AsyncHTTPTransport(verify=verify))


def _http_client(base_url: str, transport: httpx.AsyncHTTPTransport) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=base_url, transport=transport, timeout=DEFAULT_TIMEOUT_S, trust_env=False,
        headers={"Accept-Encoding": "identity"},
    )  # fmt: skip


def _argv(command: str | Sequence[str]) -> str | list[str]:
    return command if isinstance(command, str) else list(command)


def _message(answer: httpx.Response) -> str:
    try:
        fields = answer.json()
    except (ValueError, RecursionError):
        return answer.text[:300]
    if isinstance(fields, dict):
        return str(fields.get("error") or fields.get("message") or fields)[:300]
    return str(fields)[:300]
