"""Links from Dagster to the viewer."""

from starlette.testclient import TestClient
from viewer_samples import write_sample_store

from assets.links import viewer_links
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.web.viewer.app import create_app
from osworld_pipeline.web.viewer.settings import ViewerSettings


def test_links_of_a_stage_lead_to_its_episodes_and_groups_in_the_viewer(tmp_path) -> None:
    state = StateDir(tmp_path)
    write_sample_store(state)
    links = viewer_links("http://127.0.0.1:8765/", "abc123")
    with TestClient(create_app(ViewerSettings(state=state)), base_url="http://127.0.0.1:8765") as client:
        assert "33 of 33 episodes" in client.get(links["episodes"]).text
        assert "2 rollout groups" in client.get(links["groups"]).text
        for name, url in viewer_links("http://127.0.0.1:8765", "another").items():
            assert "No matching" in client.get(url).text, name
