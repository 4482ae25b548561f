"""Raw sources from Hugging Face dataset ids: each file is pinned to a commit, checked against the lock file, and
written atomically to the path that the union build reads.

The hub client handles the token (its login or its environment variable); this module neither reads nor prints it.
"""

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from osworld_pipeline.atomic_io import locked
from osworld_pipeline.datasets.source_lock import LOCK_FILE, SourceLock, read_source_lock, write_source_lock
from osworld_pipeline.datasets.sources import REPLAY_SOURCES, TASK_SOURCES, Source
from osworld_pipeline.errors import DatasetError, DependencyError, StoreError
from osworld_pipeline.progress import BYTES, OnProgress, Tally, begin

if TYPE_CHECKING:
    from huggingface_hub import DatasetInfo

HUB_SOURCES = {source.name: source for source in (*REPLAY_SOURCES, *TASK_SOURCES) if source.kind != "task_tree"}
"""Sources that can be fetched: those that are one file."""
STAGING = ".fetch"
"""Folder of partial downloads, from which an interrupted one resumes; removed when the file is in place."""
TIMEOUT_S = 30.0
"""Limit of one response of the hub."""
LOCK_TIMEOUT_S = 10.0
_REQUEST = re.compile(
    r"(?P<source>\w+)=(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[^:\s]+))?(?::(?P<file>\S+))?", re.ASCII
)
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, kw_only=True)
class FetchRequest:
    source: Source
    repo_id: str
    revision: str = "main"
    """A branch, tag or commit."""
    filename: str = ""
    """Path in the repository; if empty, the one file with the source's own file name."""


@dataclass(frozen=True, kw_only=True)
class Fetched:
    lock: SourceLock
    path: Path
    was_there: bool
    """The same file was in place already; nothing was downloaded."""


def parse_request(text: str) -> FetchRequest:
    """`SOURCE=ORG/NAME[@REVISION][:FILE]`. Raises DatasetError."""
    match = _REQUEST.fullmatch(text)
    if match is None:
        raise DatasetError(f"cannot read '{text}': a source to fetch is written SOURCE=ORG/NAME[@REVISION][:FILE]")
    if match["source"] not in HUB_SOURCES:
        raise DatasetError(f"no source named '{match['source']}'; there are: {', '.join(HUB_SOURCES)}")
    return FetchRequest(
        source=HUB_SOURCES[match["source"]],
        repo_id=match["repo"],
        revision=match["revision"] or "main",
        filename=match["file"] or "",
    )


def fetch_sources(
    requests: Sequence[FetchRequest],
    datasets_root: Path,
    *,
    endpoint: str | None = None,
    on_fetched: Callable[[Fetched], None] | None = None,
    on_progress: OnProgress | None = None,
) -> tuple[Fetched, ...]:
    """Downloads each file, unless the requested revision of it is locked and in place; another file there is replaced.
    Locks each one as soon as it is in place.

    Raises:
        DependencyError: huggingface_hub is not installed.
        DatasetError: the hub cannot be reached or refuses, no such dataset, revision or file, the content differs from
            that locked under the same revision, the lock file is damaged, or another fetch runs in this folder.
        StoreError: the file system refused.
    """
    results: list[Fetched] = []
    with locked(
        datasets_root / f"{STAGING}.lock", timeout_s=LOCK_TIMEOUT_S, error=DatasetError, what="the datasets folder"
    ):
        for request in requests:
            result = _fetch(request, datasets_root, endpoint, on_progress)
            locks = {**read_source_lock(datasets_root), request.source.name: result.lock}
            write_source_lock(datasets_root, locks)
            results.append(result)
            if on_fetched is not None:
                on_fetched(result)
    return tuple(results)


def _fetch(request: FetchRequest, root: Path, endpoint: str | None, on_progress: OnProgress | None) -> Fetched:
    begin(on_progress, f"looking for {request.source.name}")
    known = read_source_lock(root).get(request.source.name)
    path = root / request.source.path
    if known is not None and _is_pinned(request, known) and path.is_file() and _sha256(path) == known.sha256:
        return Fetched(lock=known, path=path, was_there=True)
    info = _ask(request, lambda hub: hub.HfApi(endpoint=endpoint).dataset_info(
        request.repo_id, revision=request.revision, timeout=TIMEOUT_S, files_metadata=False
    ))  # fmt: skip
    filename, revision = _filename(request, info), str(info.sha)
    is_same = known is not None and (known.repo_id, known.filename, known.revision) == (
        request.repo_id,
        filename,
        revision,
    )
    if known is not None and is_same and path.is_file() and _sha256(path) == known.sha256:
        return Fetched(lock=known, path=path, was_there=True)
    staging = root / STAGING / request.source.name / revision
    downloaded = _ask(request, lambda hub: _download(hub, request, filename, revision, staging, endpoint, on_progress))
    begin(on_progress, f"checking {request.source.name}")
    sha256 = _sha256(downloaded)
    if known is not None and is_same and known.sha256 != sha256:
        shutil.rmtree(root / STAGING / request.source.name, ignore_errors=True)
        raise DatasetError(
            f"{request.repo_id} now has another {filename} under the same revision {revision} (sha256 {sha256[:12]}, "
            f"locked {known.sha256[:12]}): check the reason; to accept it, remove "
            f"'{request.source.name}' from {LOCK_FILE}"
        )
    lock = SourceLock(
        source=request.source.name,
        repo_id=request.repo_id,
        filename=filename,
        revision=revision,
        requested=request.revision,
        sha256=sha256,
        num_bytes=downloaded.stat().st_size,
        licence=_licence(info),
    )
    _ask(request, lambda _: _put(downloaded, path))
    shutil.rmtree(root / STAGING / request.source.name, ignore_errors=True)
    with suppress(OSError):
        (root / STAGING).rmdir()  # fails if the folder still has another source's download
    return Fetched(lock=lock, path=path, was_there=False)


def _download(
    hub: Any,
    request: FetchRequest,
    filename: str,
    revision: str,
    staging: Path,
    endpoint: str | None,
    on_progress: OnProgress | None,
) -> Path:
    """Returns the file in the staging folder. A partial download of an earlier process is resumed; the etag in its name
    shows that the content is the same."""
    from huggingface_hub.file_download import http_get

    url = hub.hf_hub_url(request.repo_id, filename, repo_type="dataset", revision=revision, endpoint=endpoint)
    found = hub.get_hf_file_metadata(url, timeout=TIMEOUT_S, endpoint=endpoint)
    staging.mkdir(parents=True, exist_ok=True)
    part = staging / hashlib.sha256(f"{filename} {found.etag}".encode()).hexdigest()
    with part.open("ab") as file:
        if found.size is not None and file.tell() > found.size:
            file.truncate(0)
        http_get(
            url,
            file,
            resume_size=file.tell(),
            headers=hub.utils.build_hf_headers(),
            expected_size=found.size,
            tqdm_class=_reporting(on_progress, f"receiving {request.source.name}"),
        )
    return part


def _reporting(on_progress: OnProgress | None, what: str) -> Any:
    """The class of a progress bar that the client makes: it draws nothing."""
    from huggingface_hub.utils import tqdm

    class Bar(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options | {"disable": True})
            self._received = Tally(on_progress, what, options["total"] or 0, BYTES)
            self._received.add(options["initial"])

        def update(self, n: float | None = 1) -> None:
            self._received.add(int(n or 0))

    return Bar


def _is_pinned(request: FetchRequest, known: SourceLock) -> bool:
    """A locked commit needs no request to the hub."""
    return (
        _COMMIT.fullmatch(request.revision) is not None
        and (known.repo_id, known.revision) == (request.repo_id, request.revision)
        and request.filename in ("", known.filename)
    )


def _filename(request: FetchRequest, info: "DatasetInfo") -> str:
    files = [sibling.rfilename for sibling in info.siblings or ()]
    if request.filename:
        if request.filename in files:
            return request.filename
        raise DatasetError(f"no file {request.filename} in {request.repo_id}; there are: {_some(files)}")
    name = PurePosixPath(request.source.path).name
    found = [file for file in files if PurePosixPath(file).name == name]
    if name in found or len(found) == 1:
        return name if name in found else found[0]
    raise DatasetError(
        f"{len(found) or 'no'} files named {name} in {request.repo_id}: name one with "
        f"{request.source.name}={request.repo_id}:FILE; there are: {_some(files)}"
    )


def _some(files: Sequence[str]) -> str:
    return ", ".join(files[:10]) + (f" and {len(files) - 10} more" if len(files) > 10 else "") or "none"


def _licence(info: "DatasetInfo") -> str:
    card = info.card_data.to_dict() if info.card_data is not None else {}
    found = card.get("license_name") or card.get("license") or ""
    if isinstance(found, list):
        return ", ".join(map(str, found))
    return str(found) or next(
        (tag.removeprefix("license:") for tag in info.tags or () if tag.startswith("license:")), ""
    )


def _put(downloaded: Path, path: Path) -> None:
    """The download is on the same file system, so the rename is atomic."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with downloaded.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(downloaded, path)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _ask(request: FetchRequest, call: Callable[[Any], Any]) -> Any:
    """Calls the hub. A failure of the hub is raised as a DatasetError of one sentence, a file that cannot be written as
    a StoreError, a missing client as a DependencyError. The hub's own messages contain no token."""
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ImportError as error:
        raise DependencyError("fetching needs huggingface_hub: install the extra 'pipeline'") from error

    what = f"{request.source.name} from {request.repo_id}@{request.revision}"
    by_hand = f"or put the file at {request.source.path} in the datasets folder by hand"
    try:
        return call(huggingface_hub)
    except errors.GatedRepoError as error:
        raise DatasetError(
            f"cannot fetch {what}: request access on the dataset's page, then log in to the hub"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise DatasetError(f"cannot fetch {what}: there is no such revision; name a branch, tag or commit") from error
    except errors.RepositoryNotFoundError as error:
        raise DatasetError(
            f"cannot fetch {what}: no such dataset, or it is private; check the name, or log in to the hub"
        ) from error
    except errors.HfHubHTTPError as error:
        status = f"status {error.response.status_code}" if error.response is not None else "an error without a status"
        raise DatasetError(f"cannot fetch {what}: the hub answered with {status}; try again, {by_hand}") from error
    except (errors.HFValidationError, errors.FileMetadataError) as error:
        raise DatasetError(f"cannot fetch {what}: {str(error).splitlines()[0][:200]}; fix that, {by_hand}") from error
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None and not isinstance(error, ConnectionError):
            raise StoreError(f"cannot write {what}: {error.strerror}; fix that and fetch again") from error
        # The client uses an HTTP library whose errors do not share a base class with the client's.
        raise DatasetError(
            f"cannot fetch {what}: the hub cannot be reached ({type(error).__name__}); check the network and "
            f"HF_HUB_OFFLINE, {by_hand}"
        ) from error
