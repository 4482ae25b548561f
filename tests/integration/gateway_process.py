"""Runs a real osworld-gateway for a test: a process over real local desktops, with a token, and HTTPS by a certificate
of its own."""

import json
import os
import signal
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from env_server.providers.gateway.client import ClientOptions
from env_server.providers.gateway.https_client import HttpsSandboxClient

READY_TIMEOUT_S = 120.0
TOKEN = "a token that no log may hold"


@dataclass(frozen=True, kw_only=True)
class RunningGateway:
    url: str
    certificate: Path
    process: subprocess.Popen[bytes]
    log: Path

    def health(self) -> dict[str, Any]:
        with httpx.Client(verify=ssl.create_default_context(cafile=self.certificate), trust_env=False) as http:
            return http.get(f"{self.url}/healthz", timeout=10).json()

    @property
    def options(self) -> ClientOptions:
        return ClientOptions(url=self.url, token=TOKEN, ca_file=self.certificate)

    def client(self) -> HttpsSandboxClient:
        return HttpsSandboxClient(self.options)


@contextmanager
def running_gateway(folder: Path, *options: str, images: Path, screen: tuple[int, int]) -> Iterator[RunningGateway]:
    key, certificate, ready, log = (folder / name for name in ("key.pem", "cert.pem", "gateway.json", "gateway.log"))
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate],
        check=True, capture_output=True, timeout=30,
    )  # fmt: skip
    environment = {**os.environ, "OSWORLD_SANDBOX_TOKEN": TOKEN}
    with tempfile.TemporaryDirectory(prefix="gw-") as temporary, log.open("wb") as output:
        environment["TMPDIR"] = temporary  # short, because it holds sockets
        process = subprocess.Popen(
            [sys.executable, "-m", "env_server.gateway_server.main", "--port", "0", "--state-dir", str(images),
             "--ready-file", str(ready), "--screen-size", f"{screen[0]}x{screen[1]}", "--tls-cert", str(certificate),
             "--tls-key", str(key), "--die-with-parent", str(os.getpid()), *options],
            stdout=output, stderr=output, env=environment,
        )  # fmt: skip
        try:
            deadline = time.monotonic() + READY_TIMEOUT_S
            while not ready.exists():
                assert process.poll() is None, log.read_text()[-2000:]
                assert time.monotonic() < deadline, log.read_text()[-2000:]
                time.sleep(0.05)
            url = json.loads(ready.read_text())["url"]
            yield RunningGateway(url=url, certificate=certificate, process=process, log=log)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            try:
                process.wait(40)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
