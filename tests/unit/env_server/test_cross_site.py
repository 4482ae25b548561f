"""A page of another site, open in a browser of the machine, cannot drive a server that has no token."""

import pytest
from served_app import serving

TOKEN = {"ENV_SERVER_TOKEN": "a-long-enough-token"}
PATHS = ("/", "/health", "/v1/episodes", "/metrics", "/osgym/reset", "/reset")


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "attacker.example"},
        {"Host": "attacker.example:8000"},
        {"Host": "127.0.0.1.attacker.example"},
        {"Host": "localhost.attacker.example"},
        {"Host": ""},
        {"Host": "[::2]:8000"},
        {"Host": "localhost", "Sec-Fetch-Site": "cross-site"},
        {"Host": "localhost", "Sec-Fetch-Site": "same-site"},
        {"Host": "localhost", "Origin": "https://attacker.example"},
        {"Host": "localhost:8000", "Origin": "http://localhost:3000"},
        {"Host": "localhost", "Origin": "null"},
    ],
)
async def test_requests_of_another_site_are_refused_on_every_path(headers: dict[str, str]) -> None:
    async with serving() as server:
        for path in PATHS:
            for method in ("GET", "POST", "OPTIONS"):
                answer = await server.http.request(method, path, headers=headers)
                assert answer.status_code == 403, (method, path)
                assert answer.json()["fault"] == "client_error"
                assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "localhost:8000"},
        {"Host": "LOCALHOST"},
        {"Host": "127.0.0.1:8000"},
        {"Host": "127.8.9.10"},
        {"Host": "[::1]:8000"},
        {"Host": "localhost:8000", "Origin": "http://localhost:8000", "Sec-Fetch-Site": "same-origin"},
        {"Host": "localhost:8000", "Sec-Fetch-Site": "none"},
    ],
)
async def test_programs_of_this_machine_and_the_servers_own_page_are_answered(headers: dict[str, str]) -> None:
    async with serving() as server:
        assert (await server.http.get("/health", headers=headers)).status_code == 200


async def test_with_a_token_any_host_name_is_accepted_and_the_token_decides() -> None:
    async with serving(environment=TOKEN) as server:
        headers = {"Host": "desktops.example", "Sec-Fetch-Site": "cross-site"}
        assert (await server.http.get("/health", headers=headers)).status_code == 200
        assert (await server.http.get("/metrics", headers=headers)).status_code == 401
        headers["Authorization"] = f"Bearer {TOKEN['ENV_SERVER_TOKEN']}"
        assert (await server.http.get("/metrics", headers=headers)).status_code == 200
