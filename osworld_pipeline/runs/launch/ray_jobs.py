"""Ray's Jobs over their HTTP interface: the launcher needs no Ray, no matching version, and need not run in the
cluster.

All users of Ray's dashboard can read what is submitted here: do not submit secrets.
"""

import shlex
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import httpx

from osworld_pipeline.errors import EnvServerError
from osworld_pipeline.runs.launch.job_queue import JobStatus, wait_for_end
from osworld_pipeline.runs.launch.local_ray import RayCluster
from osworld_pipeline.runs.placement import RayResources
from osworld_pipeline.wire.certificates import trusted_certificates

REQUEST_TIMEOUT_S = 30.0
SUBMIT_TIMEOUT_S = 120.0
"""Ray answers once the job's supervisor runs."""
ENDED = ("SUCCEEDED", "FAILED", "STOPPED")
MISSING = "MISSING"
"""Our own status of a job that the cluster does not know."""


class RayJobs:
    """A JobQueue. Every method raises EnvServerError, which names the cluster, if the cluster does not answer or
    refuses."""

    def __init__(
        self,
        cluster: RayCluster,
        resources: RayResources,
        *,
        python: str,
        env_vars: Mapping[str, str],
        metadata: Mapping[str, str],
    ) -> None:
        """Jobs run with `python` on a node with `resources`; without any, on the head node."""
        self.url = cluster.url.rstrip("/")
        self.place = f"the Ray at {self.url}"
        self._resources = resources
        self._python = python
        self._env_vars, self._metadata = dict(env_vars), dict(metadata)
        headers = {"Authorization": f"Bearer {cluster.token}"} if cluster.token else {}
        self._client = httpx.Client(
            base_url=self.url, headers=headers, timeout=REQUEST_TIMEOUT_S, verify=trusted_certificates()
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()

    def submit(self, name: str, module: str, arguments: Sequence[str]) -> None:
        self._call(
            "POST",
            "/api/jobs/",
            timeout=SUBMIT_TIMEOUT_S,
            json={
                "entrypoint": shlex.join([self._python, "-m", module, *arguments]),
                "submission_id": name,
                "entrypoint_num_cpus": self._resources.cpus,
                "entrypoint_num_gpus": self._resources.gpus,
                "entrypoint_memory": self._resources.memory_bytes,
                "entrypoint_resources": dict(self._resources.custom),
                "runtime_env": {"env_vars": self._env_vars},
                "metadata": self._metadata,
            },
        )

    def why_waiting(self) -> str:
        return f"check at {self.url} that the cluster has {self._resources} free on one node"

    def status(self, name: str) -> JobStatus:
        response = self._call("GET", f"/api/jobs/{name}", may_be_missing=True)
        if response.status_code == httpx.codes.NOT_FOUND:
            message = "the cluster has no such job: its head was restarted"
            return JobStatus(status=MISSING, message=message, has_ended=True)
        answer: dict[str, Any] = response.json()
        return JobStatus(
            status=answer["status"],
            message=_one_line(str(answer.get("message") or "")),
            has_ended=answer["status"] in ENDED,
        )

    def stop(self, name: str, *, timeout_s: float) -> bool:
        """Stops the job: SIGTERM, then SIGKILL after three seconds. Returns whether it ended within `timeout_s`."""
        self._call("POST", f"/api/jobs/{name}/stop", may_be_missing=True)
        return wait_for_end(self, name, timeout_s=timeout_s)

    def _call(
        self,
        method: str,
        path: str,
        *,
        may_be_missing: bool = False,
        timeout: float = REQUEST_TIMEOUT_S,
        json: Mapping[str, Any] | None = None,
    ) -> httpx.Response:
        try:
            response = self._client.request(method, path, timeout=timeout, json=json)
        except httpx.HTTPError as error:
            raise EnvServerError(
                f"the Ray cluster at {self.url} does not answer ({type(error).__name__}): check that its head runs "
                "and that this machine can reach its dashboard's port"
            ) from error
        if response.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            raise EnvServerError(
                f"the Ray cluster at {self.url} refuses the launcher's token: set `token` to the cluster's token"
            )
        if response.is_error and not (may_be_missing and response.status_code == httpx.codes.NOT_FOUND):
            said = response.text.strip().splitlines()
            raise EnvServerError(
                f"the Ray cluster at {self.url} answered {method} {path} with {response.status_code}: "
                f"{said[-1] if said else 'nothing'}"
            )
        return response


def _one_line(message: str) -> str:
    """The first line, with the last line of the output that it announces."""
    lines = message.strip().splitlines()
    if len(lines) > 1 and lines[0].endswith(":"):
        return f"{lines[0]} {lines[-1]}"
    return lines[0] if lines else ""
