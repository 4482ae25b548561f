"""An env server's API in memory. Its screen changes with every action, and its grader requires a typed `good`."""

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
from osgym_envs import picture

TASKS: list[dict[str, Any]] = [
    {"id": f"t{number}", "instruction": f"Type good ({number} \u00e9).", "evaluator": {"func": "exact_match"}}
    for number in range(3)
]


class DesktopServer:
    """`faults` maps a path to the answer that replaces the normal one."""

    def __init__(self, size: tuple[int, int] = (64, 64)) -> None:
        self.size = size
        self.actions: list[str] = []
        self.requests: list[dict[str, Any]] = []
        self.open: set[str] = set()
        self.faults: dict[str, tuple[int, dict[str, Any]]] = {}
        self.num_episodes = self.shade = 0
        self.transport = httpx.MockTransport(self._answer)

    def _answer(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        body = json.loads(request.content or b"{}")
        if path in self.faults:
            status, fields = self.faults[path]
            return httpx.Response(status, json=fields)
        if path == "/health":
            return httpx.Response(200, json={"episodes": len(self.open)})
        if path == "/v1/server":
            return httpx.Response(200, json={"image_digest": "d", "grader_version": "g"})
        if path == "/reset":
            self.requests.append(body)
            self.num_episodes += 1
            self.shade, self.actions = 0, []
            self.open.add(f"e{self.num_episodes}")
            names = {"episode_id": f"e{self.num_episodes}", "replica_id": "fake-0", "provider": "fake"}
            return httpx.Response(200, json={**self._screen(), **names, "image_digest": "d", "grader_version": "g"})
        if path == "/step":
            if "rm -rf" in body["action"]:
                return httpx.Response(400, json={"error": "refused", "fault": "client_error"})
            self.actions.append(body["action"])
            self.shade += 10
            return httpx.Response(200, json={**self._screen(), "step": body["step"]})
        if path == "/evaluate":
            return httpx.Response(200, json={"reward": float(any("good" in action for action in self.actions))})
        assert path == "/close", path
        self.open.discard(body["episode_id"])
        return httpx.Response(200, json={"episode_id": body["episode_id"]})

    def _screen(self) -> dict[str, Any]:
        data = base64.b64encode(picture(self.shade, self.size)).decode()
        return {"screenshot_base64": data, "screenshot_format": "png", "screen_size": [128, 128]}


@contextmanager
def listening(server: DesktopServer) -> Iterator[str]:
    """Serves the same answers on a local port, for environments in their own processes. Yields its address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["Content-Length"]))
            answer = server._answer(httpx.Request("POST", f"http://s{self.path}", content=content))
            self.send_response(answer.status_code)
            self.send_header("Content-Length", str(len(answer.content)))
            self.end_headers()
            self.wfile.write(answer.content)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        http.daemon_threads = True
        serving = threading.Thread(target=http.serve_forever, args=(0.01,))
        serving.start()
        try:
            yield f"http://127.0.0.1:{http.server_address[1]}"
        finally:
            http.shutdown()
            serving.join()
