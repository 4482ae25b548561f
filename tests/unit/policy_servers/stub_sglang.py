"""A stub of `python -m sglang.launch_server`: takes its arguments, answers /ready and /ping, and fails on request."""

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ARGUMENTS = sys.argv[1:]
MODEL = Path(ARGUMENTS[ARGUMENTS.index("--model-path") + 1])
PORT = int(ARGUMENTS[ARGUMENTS.index("--port") + 1])


class Handler(BaseHTTPRequestHandler):
    is_hung = False

    def do_GET(self) -> None:
        if self.path == "/hang":
            Handler.is_hung = True
        body = json.dumps(
            {
                "pid": os.getpid(),
                "arguments": ARGUMENTS,
                "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
                "world_size": os.environ.get("WORLD_SIZE"),
            }
        ).encode()
        self.send_response(503 if self.path == "/ping" and Handler.is_hung else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None: ...


if (MODEL / "is-broken").exists():
    print("CUDA error: out of memory", flush=True)
    sys.exit(3)
ThreadingHTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
