"""Which desktops a program gets: the embedded server, servers by URL, or those that it starts on Ray."""

import base64
import json
import time
from pathlib import Path

import dagster as dg
import pytest

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import RecipeError
from osworld_pipeline.recipes import load_recipe
from osworld_pipeline.runs.job import DesktopJob
from osworld_pipeline.runs.placement import RayDesktops, RayResources
from osworld_pipeline.wire.run_tokens import why_invalid
from resources.desktops import DesktopsOnRay, DesktopsResource
from resources.launcher import Launcher

NOWHERE = StateDir(Path("nowhere"))


def job_of(resource: DesktopsResource, **desktop: int) -> DesktopJob:
    settings = [f"desktop.{name}={value}" for name, value in desktop.items()]
    recipe = load_recipe("smoke", settings=settings)
    with resource.serve(NOWHERE, recipe, run_id="r") as servers:
        return DesktopJob(recipe=recipe, state_root=NOWHERE.root, servers=servers)


def test_servers_on_ray_have_room_for_every_desktop_of_the_recipe() -> None:
    on_ray = DesktopsOnRay(provider="qemu", desktops_per_server=8, memory_gb_per_desktop=2.5, options=["--access-log"])
    job = job_of(DesktopsResource(ray=on_ray), num_replicas=20)
    sent = RayDesktops.of_job(json.loads(json.dumps(job.model_dump(mode="json"))))
    assert sent is not None
    assert sent.sizes == (8, 8, 4)
    assert sent.servers[0] == RayResources(cpus=0.0, memory_gb=20.0, custom={"desktop": 8.0})
    assert sent.servers[2].custom == {"desktop": 4.0}
    assert sent.options[:2] == ("--provider", "qemu")
    assert sent.options[-1] == "--access-log"
    assert job.servers.urls == ()


def test_the_pages_of_servers_on_ray_link_to_the_viewer_whose_address_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSWORLD_VIEWER_URL", "https://viewer.test")
    sent = RayDesktops.of_job(
        json.loads(json.dumps(job_of(DesktopsResource(ray=DesktopsOnRay())).model_dump(mode="json")))
    )
    assert sent is not None
    assert sent.options[sent.options.index("--viewer-url") + 1] == "https://viewer.test"


def test_desktops_are_either_given_by_url_or_started_on_ray() -> None:
    resource = DesktopsResource(urls=["http://a:1"], ray=DesktopsOnRay())
    with (
        pytest.raises(RecipeError, match=r"given twice, by URL \(http://a:1\) and by desktops\.ray"),
        resource.serve(NOWHERE, load_recipe("smoke"), run_id="r"),
    ):
        pass


def test_programs_get_an_expiring_token_of_the_run_and_not_the_token_of_the_servers() -> None:
    resource = DesktopsResource(urls=["http://a:1"], token="secret", token_hours=2)
    token = job_of(resource).servers.token
    assert token is not None
    assert "secret" not in token
    run, ends_at = token.split(".")[1:3]
    assert base64.urlsafe_b64decode(run + "==") == b"r"
    assert int(ends_at) - time.time() == pytest.approx(7200, abs=60)
    assert why_invalid("secret", token.encode()) is None
    assert job_of(DesktopsResource(urls=["http://a:1"])).servers.token is None
    assert job_of(DesktopsResource(urls=["http://a:1"], token="secret", token_hours=0)).servers.token == "secret"


def test_desktops_on_ray_have_no_identity_before_they_run() -> None:
    assert DesktopsResource(ray=DesktopsOnRay()).identity(load_recipe("smoke")) is None


def test_a_launcher_of_this_machine_refuses_desktops_on_ray(tmp_path: Path) -> None:
    job = job_of(DesktopsResource(ray=DesktopsOnRay()))
    with pytest.raises(dg.Failure) as failure:
        Launcher().launch(dg.build_asset_context(), "collect", job, print, state=StateDir(tmp_path))
    assert "set launcher.runs_on to ray, or desktops.urls to env servers" in str(failure.value.description)
    assert not failure.value.allow_retries
