"""Pushing with the hub's real client to a server of our own: one commit, none where nothing changed, and every failure
is one sentence without the token."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from export_samples import make_state
from hub_server import TOKEN, Hub, serve_hub
from progress_reports import last_of_each, never_falls
from pydantic import SecretStr

from osworld_pipeline.datasets.exporters.lake import LakeFormat, export_lake
from osworld_pipeline.errors import DatasetError
from osworld_pipeline.progress import Progress
from osworld_pipeline.publishing.dataset import plan_dataset
from osworld_pipeline.publishing.hub import Pushed, push, token_from
from osworld_pipeline.publishing.publication import LicensedRows, Publication, PublishedFile

# The client passes files to its HTTP library in a way that the library deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
REPO = "org/data"
KEY = f"datasets/{REPO}"


@pytest.fixture(autouse=True)
def plain_uploads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Uploads use LFS, because the server does not support Xet. No login of this machine's user is found."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serve_hub() as hub:
        yield hub


def publication(tmp_path: Path, **contents: bytes) -> Publication:
    files = []
    for name, data in (contents or {"large": b"large" * 1_000, "small": b"small"}).items():
        path = tmp_path / f"{name}.bin"
        path.write_bytes(data)
        files.append(PublishedFile.of(f"data/{name}.bin", path))
    return Publication(
        repo_type="dataset",
        kind="test",
        title="Rows",
        licence="mit",
        licences=(LicensedRows(what="rows", source="made up", licence="mit", rows=2),),
        files=tuple(files),
        facts={"sources": []},
        front_matter={},
        text="About.\n",
    )


def pushed(hub: Hub, plan: Publication, token: str = TOKEN, **options: bool) -> Pushed:
    return push(plan, REPO, token=SecretStr(token), endpoint=hub.url, **options)


def test_all_files_are_one_commit_with_card_and_record(hub: Hub, tmp_path: Path) -> None:
    done = pushed(hub, publication(tmp_path), is_private=True)
    repo = hub.repos[KEY]
    assert (done.is_changed, done.commit, len(repo.commits)) == (True, repo.commits[-1], 2)
    assert repo.is_private
    assert sorted(repo.files) == ["README.md", "data/large.bin", "data/small.bin", "publication.json"]
    assert repo.files["data/large.bin"] == b"large" * 1_000
    assert b'license: "mit"' in repo.files["README.md"]


@pytest.mark.parametrize("form", ["parquet", "lance"])
def test_an_exported_dataset_is_unchanged_on_the_hub(hub: Hub, tmp_path: Path, form: LakeFormat) -> None:
    state = make_state(tmp_path / "var")
    export_lake(state, tmp_path / "out", form=form, own_licence="mit")
    assert pushed(hub, plan_dataset(tmp_path / "out")).is_changed
    there = hub.repos[KEY].files
    here = {str(path.relative_to(tmp_path / "out")): path for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert there.keys() == {*here, "README.md", "publication.json"}
    assert all(there[name] == path.read_bytes() for name, path in here.items())
    assert b"| raw_counts | sft_clean | mit | 1 |" in there["README.md"]


def test_a_second_push_of_the_same_files_makes_no_commit_and_sends_nothing(hub: Hub, tmp_path: Path) -> None:
    first = pushed(hub, publication(tmp_path))
    num_uploads = hub.uploads()
    again = pushed(hub, publication(tmp_path))
    assert (again.is_changed, again.commit) == (False, first.commit)
    assert (len(hub.repos[KEY].commits), hub.uploads()) == (2, num_uploads)


def test_a_newer_publication_removes_the_files_of_the_last_one_and_no_others(hub: Hub, tmp_path: Path) -> None:
    pushed(hub, publication(tmp_path))
    hub.repos[KEY].files["data/yours.bin"] = b"x"
    done = pushed(hub, publication(tmp_path, other=b"other"))
    assert done.num_removed == 2
    assert sorted(hub.repos[KEY].files) == ["README.md", "data/other.bin", "data/yours.bin", "publication.json"]


@pytest.mark.parametrize("status", [503, 0])
@pytest.mark.parametrize("where", ["PUT /lfs/", "POST /api/datasets/org/data/preupload"])
def test_a_transient_failure_is_retried(hub: Hub, tmp_path: Path, where: str, status: int) -> None:
    hub.failures.append((where, status))
    assert pushed(hub, publication(tmp_path)).is_changed
    assert hub.failures == []
    assert hub.repos[KEY].files["data/large.bin"] == b"large" * 1_000


@pytest.mark.parametrize("status", [503, 0])
def test_a_failed_commit_leaves_the_repository_unchanged_and_the_next_push_sends_no_file_twice(
    hub: Hub, tmp_path: Path, status: int
) -> None:
    hub.failures.append(("POST /api/datasets/org/data/commit", status))
    with pytest.raises(
        DatasetError, match=r"cannot publish to org/data: the hub .*; push again; existing files are not sent again"
    ) as reported:
        pushed(hub, publication(tmp_path))
    assert TOKEN not in str(reported.value)
    assert hub.repos[KEY].files == {}
    num_uploads = hub.uploads()
    assert pushed(hub, publication(tmp_path)).is_changed
    assert hub.uploads() == num_uploads


def test_a_push_counts_the_bytes_that_it_hashes_and_sends(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = publication(tmp_path)
    num_bytes = sum(file.num_bytes for file in plan.all_files())
    monkeypatch.setattr("osworld_pipeline.publishing.hub.SENT_AT_ONCE_BYTES", 1_000)
    seen: list[Progress] = []
    push(plan, REPO, token=SecretStr(TOKEN), endpoint=hub.url, on_progress=seen.append)
    assert never_falls(seen)
    assert last_of_each(seen) == {
        "hashing files for the hub": (num_bytes, num_bytes, "bytes"),
        "sending files": (num_bytes, num_bytes, "bytes"),
        "waiting for the commit": (0, 0, ""),
    }
    assert hub.repos[KEY].files["data/large.bin"] == b"large" * 1_000


def test_a_plan_counts_the_bytes_of_the_export(tmp_path: Path) -> None:
    export_lake(make_state(tmp_path / "var"), tmp_path / "out", form="parquet", own_licence="mit")
    seen: list[Progress] = []
    num_bytes = sum(file.num_bytes for file in plan_dataset(tmp_path / "out", seen.append).files)
    assert last_of_each(seen) == {"hashing files": (num_bytes, num_bytes, "bytes")}


def test_a_wrong_token_is_an_error_of_one_sentence_and_is_never_shown(
    hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    wrong = "hf_wrongwrongwrong"
    with pytest.raises(DatasetError, match=r"the hub refused the token in HF_TOKEN \(status 401\)") as reported:
        pushed(hub, publication(tmp_path), token=wrong)
    pushed(hub, publication(tmp_path))
    shown = caplog.text + "".join(capfd.readouterr()) + str(reported.value) + repr(reported.value.__cause__)
    assert wrong not in shown
    assert TOKEN not in shown
    assert all(TOKEN.encode() not in data for data in hub.repos[KEY].files.values())


def test_a_push_is_refused_if_another_push_changed_the_repository_in_the_meantime(hub: Hub, tmp_path: Path) -> None:
    hub.failures.append(("POST /api/datasets/org/data/commit", 412))
    with pytest.raises(DatasetError, match="it was changed by another push meanwhile"):
        pushed(hub, publication(tmp_path))


def test_an_unreachable_hub_is_an_error_of_one_sentence(tmp_path: Path) -> None:
    with serve_hub() as hub:
        pass
    with pytest.raises(DatasetError, match="the hub cannot be reached"):
        pushed(hub, publication(tmp_path))


def test_the_token_comes_only_from_the_environment() -> None:
    assert token_from({"HF_TOKEN": f" {TOKEN}\n"}).get_secret_value() == TOKEN
    with pytest.raises(DatasetError, match="set HF_TOKEN"):
        token_from({})


def test_the_data_digest_is_of_names_and_contents(tmp_path: Path) -> None:
    plan = publication(tmp_path)
    assert plan.data_digest == replace(plan, files=plan.files[::-1]).data_digest
    assert plan.data_digest != publication(tmp_path, large=b"larger" * 1_000, small=b"small").data_digest
