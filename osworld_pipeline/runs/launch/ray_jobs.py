"""Ray's Jobs over their HTTP interface: the launcher needs no Ray, no matching version, and need not run in the
cluster.

All users of Ray's dashboard can read what is submitted here: do not submit secrets.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import httpx

from osworld_pipeline.errors import EnvServerError
from osworld_pipeline.runs.launch.local_ray import RayCluster

REQUEST_TIMEOUT_S = 30.0
SUBMIT_TIMEOUT_S = 120.0
"""Ray answers once the job's supervisor runs."""
ENDED = ("SUCCEEDED", "FAILED", "STOPPED")
MISSING = "MISSING"


@dataclass(frozen=True, kw_only=True)
class JobStatus:
    status: str
    """PENDING | RUNNING | SUCCEEDED | FAILED | STOPPED, or MISSING if the cluster has no such job."""
    message: str
    """Ray's message; its first line if there are several."""

    @property
    def has_ended(self) -> bool:
        return self.status in (*ENDED, MISSING)


class RayJobs:
    """Every method raises EnvServerError, which names the cluster, if the cluster does not answer or refuses."""

    def __init__(self, cluster: RayCluster) -> None:
        self.url = cluster.url.rstrip("/")
        headers = {"Authorization": f"Bearer {cluster.token}"} if cluster.token else {}
        self._client = httpx.Client(base_url=self.url, headers=headers, timeout=REQUEST_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()

    def submit(
        self, submission_id: str, entrypoint: str, *, env_vars: Mapping[str, str], metadata: Mapping[str, str]
    ) -> None:
        self._call(
            "POST",
            "/api/jobs/",
            timeout=SUBMIT_TIMEOUT_S,
            json={
                "entrypoint": entrypoint,
                "submission_id": submission_id,
                "runtime_env": {"env_vars": dict(env_vars)},
                "metadata": dict(metadata),
            },
        )

    def status(self, submission_id: str) -> JobStatus:
        response = self._call("GET", f"/api/jobs/{submission_id}", may_be_missing=True)
        if response.status_code == httpx.codes.NOT_FOUND:
            return JobStatus(status=MISSING, message="the cluster has no such job: its head was restarted")
        answer: dict[str, Any] = response.json()
        message = str(answer.get("message") or "").strip()
        return JobStatus(status=answer["status"], message=message.splitlines()[0] if message else "")

    def stop(self, submission_id: str, *, timeout_s: float) -> bool:
        """Stops the job: SIGTERM, then SIGKILL after three seconds. Returns whether it ended within `timeout_s`."""
        self._call("POST", f"/api/jobs/{submission_id}/stop", may_be_missing=True)
        return self.wait(submission_id, timeout_s=timeout_s)

    def wait(self, submission_id: str, *, timeout_s: float) -> bool:
        """Returns whether the job ended within `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while not self.status(submission_id).has_ended:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.2)
        return True

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
            raise EnvServerError(f"the Ray cluster at {self.url} refuses the launcher's token: set `token` to its own")
        if response.is_error and not (may_be_missing and response.status_code == httpx.codes.NOT_FOUND):
            said = response.text.strip().splitlines()
            raise EnvServerError(
                f"the Ray cluster at {self.url} answered {method} {path} with {response.status_code}: "
                f"{said[-1] if said else 'nothing'}"
            )
        return response
