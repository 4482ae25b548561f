"""The part of the Kubernetes API that a run launcher uses: a server with TLS and a token that checks each Job against
the published schema, and runs its pod by Podman."""

import json
import re
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from uuid import uuid4

import kubernetes_validate
from podman_cluster import Api, PodmanCluster

JOBS = re.compile(r"/apis/batch/v1/namespaces/osworld/jobs(?:/(?P<name>[\w-]+)(?:/status)?)?")
SCHEMA = "1.34"


@contextmanager
def jobs_api(cluster: PodmanCluster) -> Iterator[dict[str, dict[str, Any]]]:
    """Serves on this host's address in the network of the cluster, where pods that start later find it. Yields the jobs
    that were created, by name."""
    folder = cluster.folder / "service-account"
    folder.mkdir(mode=0o755)
    token, jobs = uuid4().hex, {}
    key = cluster.folder / "api.key"
    certificate = folder / "ca.crt"
    _make_certificate(key, certificate, cluster.gateway)
    (folder / "token").write_text(token)
    (folder / "namespace").write_text("osworld")

    class Handler(_Handler):
        created, pods = jobs, cluster

    Handler.token = token

    server = ThreadingHTTPServer((cluster.gateway, 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    cluster.api = Api(host=cluster.gateway, port=server.server_port, folder=folder)
    try:
        yield jobs
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    token: str
    created: dict[str, dict[str, Any]]
    pods: PodmanCluster

    def do_POST(self) -> None:
        if self._job_name() != "":
            return
        job = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        try:
            kubernetes_validate.validate(job, SCHEMA, strict=True)
        except kubernetes_validate.ValidationError as error:
            self._answer(422, {"kind": "Status", "message": str(error)})
            return
        name = job["metadata"]["name"]
        self.created[name] = job
        self.pods.play(name, job["spec"]["template"]["spec"])
        self._answer(201, job)

    def do_GET(self) -> None:
        name = self._job_name()
        if name is None:
            return
        if name not in self.created:
            self._answer(404, {"kind": "Status", "message": f"no job {name!r}"})
            return
        self._answer(200, self.created[name] | {"status": self._status(name)})

    def _job_name(self) -> str | None:
        """Empty for the list of jobs; None, after an answer, if the request is refused."""
        found = JOBS.fullmatch(self.path.partition("?")[0])
        scheme, _, token = self.headers.get("Authorization", "").partition(" ")
        if (scheme.lower(), token) != ("bearer", self.token):
            self._answer(401, {"kind": "Status", "message": "no such service account"})
        elif found is None:
            self._answer(404, {"kind": "Status", "message": f"{self.path} is not served here"})
        else:
            return found["name"] or ""
        return None

    def _status(self, name: str) -> dict[str, int]:
        (container,) = self.created[name]["spec"]["template"]["spec"]["containers"]
        command = ["podman", "inspect", f"{name}-{container['name']}", "--format", "{{json .State}}"]
        state = json.loads(subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout)
        if state["Running"]:
            return {"active": 1}
        return {"succeeded": 1} if state["ExitCode"] == 0 else {"failed": 1}

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def _make_certificate(key: Path, certificate: Path, address: str) -> None:
    command = [
        *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=api"),
        *("-addext", f"subjectAltName=IP:{address}", "-addext", "basicConstraints=critical,CA:TRUE"),
        *("-addext", "keyUsage=critical,digitalSignature,keyCertSign", "-keyout", str(key), "-out", str(certificate)),
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
