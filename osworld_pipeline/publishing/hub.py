"""Pushes a publication with the hub's own client: one commit for all files, none if nothing changed.

The token comes only from the environment, and is not part of any message.
"""

import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from osworld_pipeline.errors import DatasetError, DependencyError, StoreError
from osworld_pipeline.progress import BYTES, OnProgress, Tally, begin
from osworld_pipeline.publishing.publication import RECORD, Publication, PublishedFile

TOKEN_VARIABLE = "HF_TOKEN"  # noqa: S105 - the variable's name, not a token
SENT_AT_ONCE_BYTES = 256 << 20
"""Files are sent in calls of about this size; the client sends the files of one call in parallel."""
_REPO = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Pushed:
    repo: str
    commit: str
    is_changed: bool
    """False if the repository already had all of it, so that no commit was made."""
    num_files: int
    num_removed: int
    """Files of an earlier publication that are not part of this one."""


def token_from(environment: Mapping[str, str] | None = None) -> SecretStr:
    """Raises DatasetError if there is none."""
    token = (os.environ if environment is None else environment).get(TOKEN_VARIABLE, "").strip()
    if not token:
        raise DatasetError(f"publishing needs a token of the hub with write access: set {TOKEN_VARIABLE}")
    return SecretStr(token)


def need_repo(name: str) -> str:
    """Raises DatasetError if it is not `OWNER/NAME`."""
    if not _REPO.fullmatch(name):
        raise DatasetError(f"'{name}' is not the name of a hub repository: it is written OWNER/NAME")
    return name


def push(
    publication: Publication,
    repo: str,
    *,
    token: SecretStr,
    is_private: bool = False,
    endpoint: str | None = None,
    on_progress: OnProgress | None = None,
) -> Pushed:
    """Creates the repository if there is none, then commits the changes. `endpoint`: None means HF_ENDPOINT.

    Raises:
        DependencyError: huggingface_hub is not installed.
        DatasetError: the hub refuses, or cannot be reached; another push continues where this one ended.
        StoreError: a file to push no longer exists.
    """
    need_repo(repo)

    def call(hub: Any) -> Pushed:
        with _without_own_bars():
            return _push(hub, publication, repo, token, is_private, endpoint, on_progress)

    return _ask(repo, token, call)


def _push(
    hub: Any,
    publication: Publication,
    repo: str,
    token: SecretStr,
    is_private: bool,
    endpoint: str | None,
    on_progress: OnProgress | None,
) -> Pushed:
    api = hub.HfApi(endpoint=endpoint, token=token.get_secret_value())
    kind = publication.repo_type
    api.create_repo(repo, repo_type=kind, private=is_private, exist_ok=True)
    before = api.repo_info(repo, repo_type=kind, revision="main", files_metadata=False)
    there = {sibling.rfilename for sibling in before.siblings or ()}
    files = publication.all_files()
    removed = sorted(there & (_published_before(api, repo, kind, there) - {file.path for file in files}))
    added = _hashed(hub, files, on_progress)
    _send(api, repo, kind, files, added, on_progress)
    begin(on_progress, "waiting for the commit")
    done = api.create_commit(
        repo,
        repo_type=kind,
        operations=[
            *added,
            *(hub.CommitOperationDelete(path_in_repo=path) for path in removed),
        ],
        commit_message=f"Publish {publication.kind} {publication.data_digest[:12]}",
        # A concurrent push makes this one fail, so that the two do not mix.
        parent_commit=before.sha,
    )
    return Pushed(
        repo=repo,
        commit=str(done.oid),
        is_changed=str(done.oid) != str(before.sha),
        num_files=len(files),
        num_removed=len(removed),
    )


def _hashed(hub: Any, files: Sequence[PublishedFile], on_progress: OnProgress | None) -> list[Any]:
    """The operations that add the files; the client hashes each when it makes one."""
    hashed = Tally(on_progress, "hashing files for the hub", sum(file.num_bytes for file in files), BYTES)
    added: list[Any] = []
    for file in files:
        added.append(hub.CommitOperationAdd(path_in_repo=file.path, path_or_fileobj=_content(file)))
        hashed.add(file.num_bytes)
    return added


def _send(
    api: Any,
    repo: str,
    kind: str,
    files: Sequence[PublishedFile],
    added: Sequence[Any],
    on_progress: OnProgress | None,
) -> None:
    """Sends the large files, some at a time; the commit then names them."""
    sent = Tally(on_progress, "sending files", sum(file.num_bytes for file in files), BYTES)
    start = num_bytes = 0
    for end, file in enumerate(files, start=1):
        num_bytes += file.num_bytes
        if num_bytes >= SENT_AT_ONCE_BYTES or end == len(files):
            api.preupload_lfs_files(repo, added[start:end], repo_type=kind, free_memory=False)
            sent.add(num_bytes)
            start, num_bytes = end, 0


@contextmanager
def _without_own_bars() -> Iterator[None]:
    """The client draws bars on any terminal."""
    from huggingface_hub import utils

    if utils.are_progress_bars_disabled():
        yield
        return
    utils.disable_progress_bars()
    try:
        yield
    finally:
        utils.enable_progress_bars()


def _content(file: PublishedFile) -> str | bytes:
    return file.content if isinstance(file.content, bytes) else str(file.content)


def _published_before(api: Any, repo: str, kind: str, there: set[str]) -> set[str]:
    """Files of an earlier publication; files that others added are kept."""
    if RECORD not in there:
        return set()
    with tempfile.TemporaryDirectory() as folder:
        path = api.hf_hub_download(repo, RECORD, repo_type=kind, local_dir=folder)
        try:
            return set(json.loads(Path(path).read_bytes())["files"])
        except (ValueError, KeyError, TypeError):
            return set()


def _ask(repo: str, token: SecretStr, call: Callable[[Any], Pushed]) -> Pushed:
    """Calls the hub and raises each of its failures as a DatasetError of one sentence."""
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ImportError as error:
        raise DependencyError("publishing needs huggingface_hub: install the extra 'pipeline'") from error

    def redacted(sentence: str) -> str:
        return f"cannot publish to {repo}: {sentence}".replace(token.get_secret_value(), "***")

    again = "push again; existing files are not sent again"
    try:
        return call(huggingface_hub)
    except errors.HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else 0
        if status in (401, 403):
            refused = f"the hub refused the token in {TOKEN_VARIABLE} (status {status})"
            raise DatasetError(redacted(f"{refused}: use one with write access to {repo}")) from error
        if status == 412:
            raise DatasetError(redacted(f"it was changed by another push meanwhile; {again}")) from error
        raise DatasetError(redacted(f"the hub answered with status {status or 'none'}; {again}")) from error
    except errors.HFValidationError as error:
        raise DatasetError(redacted(str(error).splitlines()[0][:200])) from error
    except FileNotFoundError as error:
        raise StoreError(redacted(f"{error.filename} is gone")) from error
    except Exception as error:
        # The client uses an HTTP library whose errors do not share a base class with the client's.
        raise DatasetError(redacted(f"the hub cannot be reached ({type(error).__name__}); {again}")) from error
