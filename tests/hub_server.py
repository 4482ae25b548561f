"""A hub that speaks the real client's protocol: repositories with commits, regular files, and LFS objects with their
own upload addresses. It fails when a test makes it fail."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_secretsecretsecret"
LFS_FROM = 1_000
"""Files of so many bytes are LFS's."""


@dataclass
class Repo:
    commits: list[str] = field(default_factory=lambda: ["0" * 40])
    files: dict[str, bytes] = field(default_factory=dict)
    is_private: bool = False


@dataclass
class Hub:
    """What the server holds, and what it was asked."""

    url: str = ""
    repos: dict[str, Repo] = field(default_factory=dict)
    """By `datasets/OWNER/NAME` or `models/OWNER/NAME`."""
    objects: dict[str, bytes] = field(default_factory=dict)
    """Of LFS, by SHA-256."""
    requests: list[str] = field(default_factory=list)
    failures: list[tuple[str, int]] = field(default_factory=list)
    """(pattern of method and path, status) each for one request; status 0 drops the connection half way."""

    def uploads(self) -> int:
        return sum(request.startswith("PUT /lfs/") for request in self.requests)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, format: str, *args: Any) -> None: ...

    def do_GET(self) -> None:
        self._serve()

    do_HEAD = do_POST = do_PUT = do_GET

    def _serve(self) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        request = f"{self.command} {path}"
        hub.requests.append(request)
        failure = next((one for one in hub.failures if re.match(one[0], request)), None)
        length = int(self.headers.get("Content-Length", 0))
        if failure:
            hub.failures.remove(failure)
            self.rfile.read(length if failure[1] else length // 2)
            if failure[1]:
                self._answer(failure[1], {"error": "injected"})
            self.close_connection = True
            return
        body = self._chunked() if self.headers.get("Transfer-Encoding") == "chunked" else self.rfile.read(length)
        is_upload = path.startswith("/lfs/")
        if not is_upload and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._answer(401, {"error": "Invalid credentials"})
            return
        for pattern, serve in _ROUTES:
            if found := re.fullmatch(pattern, request):
                serve(self, body, *found.groups())
                return
        self._answer(404, {"error": f"no {request}"})

    def _chunked(self) -> bytes:
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _create(self, body: bytes) -> None:
        asked = json.loads(body)
        kind = f"{asked.get('type') or 'model'}s"
        name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
        known = f"{kind}/{name}" in self.hub.repos
        if not known:
            self.hub.repos[f"{kind}/{name}"] = Repo(is_private=asked.get("visibility") == "private")
        prefix = "" if kind == "models" else f"{kind}/"
        self._answer(409 if known else 200, {"url": f"{self.hub.url}/{prefix}{name}"})

    def _info(self, body: bytes, kind: str, name: str) -> None:
        repo = self._repo(kind, name)
        siblings = [{"rfilename": path} for path in sorted(repo.files)]
        self._answer(200, {"id": name, "sha": repo.commits[-1], "siblings": siblings, "tags": [], "private": False})

    def _preupload(self, body: bytes, kind: str, name: str) -> None:
        repo, answers = self._repo(kind, name), []
        for file in json.loads(body)["files"]:
            is_lfs = file["size"] >= LFS_FROM
            answer = {"path": file["path"], "uploadMode": "lfs" if is_lfs else "regular", "shouldIgnore": False}
            if (data := repo.files.get(file["path"])) is not None:
                answer["oid"] = hashlib.sha256(data).hexdigest() if len(data) >= LFS_FROM else _git_oid(data)
            answers.append(answer)
        self._answer(200, {"files": answers})

    def _batch(self, body: bytes, name: str) -> None:
        asked = json.loads(body)
        objects = []
        for one in asked["objects"]:
            upload = {"href": f"{self.hub.url}/lfs/{one['oid']}"}
            verify = {"href": f"{self.hub.url}/verify/{one['oid']}"}
            actions = {} if one["oid"] in self.hub.objects else {"actions": {"upload": upload, "verify": verify}}
            objects.append({"oid": one["oid"], "size": one["size"], **actions})
        self._answer(200, {"transfer": "basic", "objects": objects})

    def _upload(self, body: bytes, oid: str) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            self._answer(400, {"error": "wrong content"})
            return
        self.hub.objects[oid] = body
        self._answer(200, {})

    def _verify(self, body: bytes, oid: str) -> None:
        self._answer(200 if oid in self.hub.objects else 404, {})

    def _commit(self, body: bytes, kind: str, name: str) -> None:
        repo = self._repo(kind, name)
        files, lines = dict(repo.files), [json.loads(line) for line in body.splitlines()]
        if lines[0]["value"].get("parentCommit") not in (None, repo.commits[-1]):
            self._answer(412, {"error": "A commit has happened since"})
            return
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.objects[value["oid"]]
            else:
                del files[value["path"]]
        repo.files = files
        repo.commits.append(hashlib.sha1(repo.commits[-1].encode() + body).hexdigest())
        url = f"{self.hub.url}/{name}/commit/{repo.commits[-1]}"
        self._answer(200, {"commitUrl": url, "commitOid": repo.commits[-1], "success": True})

    def _validate(self, body: bytes) -> None:
        self._answer(200, {"warnings": [], "errors": []})

    def _resolve(self, body: bytes, kind: str | None, name: str, path: str) -> None:
        repo = self._repo(kind or "models", name)
        data = repo.files[path]
        self._answer(200, data, {"ETag": f'"{_git_oid(data)}"', "X-Repo-Commit": repo.commits[-1]})

    def _repo(self, kind: str, name: str) -> Repo:
        return self.hub.repos[f"{kind}/{name}"]

    def _answer(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def _git_oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


_REPO = r"(datasets|models)/([^/]+/[^/]+)"
_ROUTES: tuple[tuple[str, Any], ...] = (
    (r"POST /api/repos/create", _Handler._create),
    (r"POST /api/validate-yaml", _Handler._validate),
    (rf"GET /api/{_REPO}(?:/revision/main)?", _Handler._info),
    (rf"POST /api/{_REPO}/preupload/main", _Handler._preupload),
    (r"POST /(?:datasets/)?([^/]+/[^/]+)\.git/info/lfs/objects/batch", _Handler._batch),
    (r"PUT /lfs/([0-9a-f]{64})", _Handler._upload),
    (r"POST /verify/([0-9a-f]{64})", _Handler._verify),
    (rf"POST /api/{_REPO}/commit/main", _Handler._commit),
    (r"(?:GET|HEAD) /(?:(datasets)/)?([^/]+/[^/]+)/resolve/[^/]+/(.+)", _Handler._resolve),
)


@contextmanager
def serve_hub() -> Iterator[Hub]:
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
