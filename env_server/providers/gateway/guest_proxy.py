"""Serves a guest's protocol on a Unix socket of this machine, for programs with their own HTTP client, such as
OSWorld's graders: each request is forwarded through the guest's own transport, with its retry rules."""

import asyncio
from pathlib import Path

import h11
import httpx

from osworld_pipeline.errors import ReplicaError

READ_BYTES = 256 * 1024
MAX_BODY_BYTES = 512 * 1024 * 1024
IDLE_LIMIT_S = 120.0
CALL_LIMIT_S = 300.0
"""Limit of one call; the calling program has its own, shorter limits."""


class GuestProxy:
    def __init__(self, transport: httpx.AsyncBaseTransport) -> None:
        self._http = httpx.AsyncClient(base_url="http://guest", transport=transport, timeout=CALL_LIMIT_S)
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[None]] = set()

    async def listen(self, path: Path) -> None:
        self._server = await asyncio.start_unix_server(self._serve, path)

    async def close(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close()
        for task in self._serving:
            task.cancel()
        if self._serving:
            await asyncio.wait(set(self._serving))
        await self._http.aclose()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "start_unix_server makes one"
        self._serving.add(task)
        try:
            connection = h11.Connection(h11.SERVER)
            while await self._answer_one(connection, reader, writer):
                connection.start_next_cycle()
        except (OSError, TimeoutError, h11.ProtocolError):
            pass  # the caller sees its connection closed, as if the guest were gone
        except asyncio.CancelledError:
            pass  # only by `close`
        finally:
            writer.close()
            self._serving.discard(task)

    async def _answer_one(
        self, connection: h11.Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """False if the connection is over."""
        request: h11.Request | None = None
        body = bytearray()
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                if connection.they_are_waiting_for_100_continue:
                    go_on = h11.InformationalResponse(status_code=100, headers=[])
                    writer.write(connection.send(go_on) or b"")
                async with asyncio.timeout(IDLE_LIMIT_S):
                    connection.receive_data(await reader.read(READ_BYTES))
            elif isinstance(event, h11.Request):
                request = event
            elif isinstance(event, h11.Data):
                body += event.data
                if len(body) > MAX_BODY_BYTES:
                    return False
            elif isinstance(event, h11.EndOfMessage):
                break
            else:  # closed, or paused by a client that has closed
                return False
        assert request is not None, "a body comes after its head"
        status, headers, data = await self._forward(request, bytes(body))
        writer.write(connection.send(h11.Response(status_code=status, headers=headers)) or b"")
        writer.write(connection.send(h11.Data(data=data)) or b"")
        writer.write(connection.send(h11.EndOfMessage()) or b"")
        await writer.drain()
        return connection.our_state is h11.DONE and connection.their_state is h11.DONE

    async def _forward(self, request: h11.Request, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        kind = dict(request.headers).get(b"content-type", b"").decode("latin-1")
        try:
            answer = await self._http.request(
                request.method.decode(),
                request.target.decode("latin-1"),
                headers={"content-type": kind} if kind else {},
                content=body,
            )
        except (ReplicaError, httpx.HTTPError) as error:
            text = str(error).encode()
            return 502, [("content-type", "text/plain"), ("content-length", str(len(text)))], text
        headers = [("content-length", str(len(answer.content)))]
        if "content-type" in answer.headers:
            headers.append(("content-type", answer.headers["content-type"]))
        return answer.status_code, headers, answer.content
