"""The pages over a sample store: all answer, model output is shown as text, and only the store can be reached."""

import re
from collections.abc import Iterator
from urllib.parse import quote

import pytest
from pydantic import SecretStr
from starlette.testclient import TestClient
from viewer_samples import CLICK, GSPO, HOSTILE, KEY, SFT, SIZE, SOLVING, TASKS, draw_screen, make_played

from osworld_pipeline.domain.digest import digest_bytes
from osworld_pipeline.domain.episode import Outcome
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.store import BlobStore, TrajectoryStore
from osworld_pipeline.web.reports.report_index import INDEX_FILE
from osworld_pipeline.web.viewer.app import create_app
from osworld_pipeline.web.viewer.settings import ViewerSettings

HOST = "http://127.0.0.1:8765"
SOLVED = f"eval-{GSPO}-{KEY}-{TASKS[0][0]}-s0"
PLAYED = f"eval-{SFT}-{KEY}-{TASKS[1][0]}-s0"


@pytest.fixture(scope="module")
def client(sample_state: StateDir) -> Iterator[TestClient]:
    with TestClient(
        create_app(ViewerSettings(state=sample_state)), base_url=HOST, raise_server_exceptions=False
    ) as one:
        yield one


PAGES = {
    "/": "83.3% 10 of 12, desktop-basics",
    "/episodes": "33 episodes",
    "/episodes?outcome=success&stage=sft": "of 33 episodes",
    "/episodes?task=nothing": "No matching episode",
    f"/episode/{SOLVED}": "action parsed and executed",
    f"/episode/{SOLVED}?step=999&outcome=success": "step 6 of 6",
    f"/group/{GSPO}-u0000-g00": "Advantages are those of the update",
    "/groups": "2 rollout groups",
    "/groups?fate=stale": "No matching group",
    "/compare": "Choose two that were evaluated",
    f"/compare?a={SFT}&b={GSPO}": "6 tasks",
    f"/compare?a={SFT}&b=nobody": "not evaluated with the same settings",
    f"/side-by-side?episode={SOLVED}&episode={PLAYED}": "stepped together",
}


@pytest.mark.parametrize("address", PAGES)
def test_every_page_answers_with_its_content(client: TestClient, address: str) -> None:
    answer = client.get(address)
    assert answer.status_code == 200
    assert PAGES[address] in re.sub(r"\s+", " ", re.sub(r"<[^>]+>", "", answer.text))


def test_click_is_drawn_where_it_was(client: TestClient) -> None:
    """The sample's third action clicks the middle of the button Save."""
    page = client.get(f"/episode/{SOLVED}?step=3").text
    step = page.split('data-step="2"')[1].split("</article>")[0]
    assert f'viewBox="0 0 {SIZE[0]} {SIZE[1]}"' in step
    assert f'data-x="{CLICK[0]}" data-y="{CLICK[1]}"' in step
    assert f'cx="{CLICK[0]}" cy="{CLICK[1]}"' in step
    assert SOLVING[2].action is not None


def test_episode_without_a_step_says_why_and_has_nothing_to_step_through(client: TestClient) -> None:
    page = client.get(f"/episode/{GSPO}-u0000-g00-s03").text
    assert "No step was played: the engine answered 503 three times" in page
    assert "data-scrubber" not in page


def test_model_output_is_shown_as_text(client: TestClient) -> None:
    for address in ("/episode/hostile", "/episodes?sort=oldest", f"/episodes?q={quote(HOSTILE)}", f"/nope{HOSTILE}"):
        page = client.get(address).text
        assert "<script>document" not in page
        assert "<img src=x" not in page
        assert "other-<b>" not in page


def test_page_may_load_and_run_nothing_but_our_own(client: TestClient) -> None:
    answer = client.get("/episodes")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
    assert answer.headers["cache-control"] == "no-store"
    assert "style=" not in answer.text
    assert not re.search(r"<script(?! src=)", answer.text)
    assert not re.search(r"\son\w+=", answer.text)
    for name in re.findall(r'(?:src|href)="(/static/[^"]+)"', answer.text):
        assert client.get(name).headers["cache-control"].endswith("immutable")


def test_a_screenshot_is_served_by_its_hash_and_cached_as_immutable(client: TestClient, sample_state: StateDir) -> None:
    data = draw_screen("Unsaved changes")
    answer = client.get(f"/blob/{digest_bytes(data)}")
    assert (answer.content, answer.headers["content-type"]) == (data, "image/png")
    assert "immutable" in answer.headers["cache-control"]
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_existing_reports_are_served_and_no_other_file_of_their_folder(own_state: StateDir) -> None:
    own_state.reports.mkdir()
    (own_state.reports / INDEX_FILE).write_text("<h1>All reports</h1>")
    (own_state.reports / "training-sft-1.html").write_text("<h1>One report</h1>")
    (own_state.reports / "notes.txt").write_text("not for the browser")
    with TestClient(create_app(ViewerSettings(state=own_state)), base_url=HOST) as client:
        assert f"/reports/{INDEX_FILE}" in client.get("/").text
        answer = client.get(f"/reports/{INDEX_FILE}")
        assert client.get("/reports/training-sft-1.html").text == "<h1>One report</h1>"
        assert client.get("/reports/notes.txt").status_code == 404
        assert client.get("/reports/..%2Fosworld.duckdb").status_code == 404
    assert answer.text == "<h1>All reports</h1>"
    assert "script-src" not in answer.headers["content-security-policy"]


@pytest.mark.parametrize(
    "name", ["f" * 64, "..%2F..%2Fosworld.duckdb", "../../etc/passwd", "%2e%2e%2f%2e%2e", "A" * 64, "0" * 63, "0" * 65]
)
def test_a_name_that_is_not_an_image_of_the_store_is_not_found(client: TestClient, name: str) -> None:
    answer = client.get(f"/blob/{name}")
    assert answer.status_code == 404
    assert b"root:" not in answer.content


def test_a_blob_that_is_not_an_image_is_not_shown(own_state: StateDir) -> None:
    data = b"<html><script>alert(1)</script></html>"
    sha256 = BlobStore(own_state.blobs).write(data, suffix="png")
    with TestClient(create_app(ViewerSettings(state=own_state)), base_url=HOST) as client:
        answer = client.get(f"/blob/{sha256}")
    assert answer.status_code == 404
    assert "neither PNG" in answer.json()["error"]


def test_a_missing_screenshot_is_reported_and_the_step_is_still_shown(own_state: StateDir) -> None:
    for path in own_state.blobs.rglob("*.png"):
        path.unlink()
    with TestClient(create_app(ViewerSettings(state=own_state)), base_url=HOST) as client:
        page = client.get(f"/episode/{SOLVED}").text
    assert "This screenshot is not in the store" in page
    assert "Drag the folder" in page


def test_state_folder_without_episodes_says_what_to_run(tmp_path) -> None:
    with TestClient(create_app(ViewerSettings(state=StateDir(tmp_path / "none"))), base_url=HOST) as client:
        for address in ("/", "/episodes"):
            assert "osworld-pipeline demo --state" in client.get(address).text
        assert client.get("/newer").json()["num_episodes"] == 0
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("address", "status", "words"),
    [("/episode/nobody", 404, "there is no episode"), ("/group/nobody", 404, "no rollout group"),
     ("/side-by-side", 422, "name 1 to 16 episodes"), ("/nowhere", 404, "there is no page"),
     ("/reports/index.html", 404, "no report index.html"),
     ("/side-by-side?episode=nobody", 404, "there is no episode")],
)  # fmt: skip
def test_a_bad_address_gives_one_sentence(client: TestClient, address: str, status: int, words: str) -> None:
    answer = client.get(address)
    assert (answer.status_code, words in answer.text) == (status, True)


def test_an_invalid_condition_is_reported_and_the_list_is_still_shown(client: TestClient) -> None:
    answer = client.get("/episodes?where=nonsense(")
    assert answer.status_code == 200
    assert "DuckDB refuses the condition" in answer.text


def test_only_the_results_of_the_list_are_sent_when_a_script_requests_them(client: TestClient) -> None:
    part = client.get("/episodes?outcome=success", headers={"X-Part": "results"}).text
    assert "<html" not in part
    assert part in client.get("/episodes?outcome=success").text


def test_nothing_can_be_changed_by_a_request(client: TestClient) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert client.request(method, "/episodes").status_code == 405


def test_requests_for_other_host_names_are_refused_without_a_token(client: TestClient) -> None:
    for host in ("evil.example", "evil.example:8765", "127.0.0.1.evil.example", ""):
        assert client.get("/", headers={"Host": host}).status_code == 403
    for host in ("localhost:1", "127.0.0.1", "[::1]:8765"):
        assert client.get("/newer", headers={"Host": host}).status_code == 200


def test_a_token_gives_a_browser_access_by_a_cookie_that_does_not_hold_the_token(sample_state: StateDir) -> None:
    settings = ViewerSettings(state=sample_state, host="0.0.0.0", token=SecretStr("a secret"))
    with TestClient(create_app(settings), base_url="http://viewer.example") as client:
        for address in ("/", "/episodes", "/blob/" + "0" * 64, "/newer"):
            assert client.get(address).status_code == 401
        assert client.get("/?token=wrong").status_code == 401
        assert client.get("/", headers={"Authorization": "Bearer a secret"}).status_code == 200
        assert client.get("/", headers={"Cookie": "osworld_viewer=a secret"}).status_code == 401
        answer = client.get("/episodes?outcome=success&token=a+secret", follow_redirects=False)
        assert (answer.status_code, answer.headers["location"]) == (303, "/episodes?outcome=success")
        cookie = answer.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "a secret" not in cookie
        assert client.get("/episodes").status_code == 200


def test_the_token_form_redirects_to_the_requested_page_and_to_no_other_site(sample_state: StateDir) -> None:
    settings = ViewerSettings(state=sample_state, token=SecretStr("a secret"))
    with TestClient(create_app(settings), base_url=HOST, follow_redirects=False) as client:
        page = client.get("/group/x?step=2")
        assert 'name="to" value="/group/x?step=2"' in page.text
        form = {"token": "a secret", "to": "/group/x?step=2"}
        assert client.post("/login", data=form).headers["location"] == "/group/x?step=2"
        for to in ("//evil.example", "https://evil.example", "/\\evil.example"):
            assert client.post("/login", data={"token": "a secret", "to": to}).headers["location"] == "/"
        assert client.post("/login", data={"token": "no"}).status_code == 401
        assert client.post("/login", content=b"token=" + b"x" * 100_000).status_code == 413


def test_a_touched_episode_says_so_and_has_no_reward(own_state: StateDir) -> None:
    error = "a person sent 3 inputs to the desktop of this episode"
    touched = make_played("touched", (), (), outcome=Outcome.TOUCHED, error=error, num_person_inputs=3, sequences=())
    TrajectoryStore(own_state).write_episodes("touched", [touched])
    app = create_app(ViewerSettings(state=own_state, env_server_urls=["http://127.0.0.1:8100/"]))
    with TestClient(app, base_url=HOST, raise_server_exceptions=False) as one:
        page = one.get("/episode/touched").text
        listed = one.get("/episodes?outcome=touched").text
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page))
    assert error in text
    assert re.search(r"Inputs of a person\s+3", text)
    assert "what a person did is not the policy's own" in text.replace("&#39;", "'")
    assert "1 of 34 episodes" in re.sub(r"\s+", " ", re.sub(r"<[^>]+>", "", listed))
    assert 'href="/live"' in page
