"""`view`: the trajectory viewer, in a browser."""

from pathlib import Path
from typing import Annotated

import typer

from osworld_pipeline.cli.machine import ServingJsonOption
from osworld_pipeline.cli.options import StateOption, StateRemoteOption, fresh_state
from osworld_pipeline.programs.addresses import ready_message
from osworld_pipeline.programs.answers import print_json
from osworld_pipeline.web.viewer import DAGSTER_URL, DEFAULT_HOST, DEFAULT_PORT, MLFLOW_URL


def register(app: typer.Typer) -> None:
    app.command()(view)


def view(
    state: StateOption = Path("var"),
    state_remote: StateRemoteOption = "",
    host: Annotated[
        str, typer.Option(help="Address to listen on; beyond loopback, OSWORLD_VIEWER_TOKEN must have a token.")
    ] = DEFAULT_HOST,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free port.")] = DEFAULT_PORT,
    episode: Annotated[str, typer.Option(help="Show this episode first.")] = "",
    opens: Annotated[bool, typer.Option("--open", help="Also open a browser.")] = False,
    mlflow_url: Annotated[str, typer.Option(help="URL of MLflow's UI.")] = MLFLOW_URL,
    dagster_url: Annotated[str, typer.Option(help="URL of Dagster's UI.")] = DAGSTER_URL,
    env_server_url: Annotated[
        list[str] | None,
        typer.Option(
            help="Address of an env server, or of several as dns+http://NAME:PORT: their desktops are shown live. "
            "Repeat it, or separate addresses by commas. ENV_SERVER_TOKEN has their token."
        ),
    ] = None,
    as_json: ServingJsonOption = False,
) -> None:
    """Show episodes step by step in a browser, read-only, also during training. Ctrl-C stops it."""
    from osworld_pipeline.web.pages import episode_url
    from osworld_pipeline.web.viewer.serving import serve
    from osworld_pipeline.web.viewer.settings import SERVER_TOKEN_VARIABLE, ViewerSettings, token_from

    settings = ViewerSettings(
        state=fresh_state(state, state_remote, as_json=as_json),
        host=host,
        port=port,
        token=token_from(),
        mlflow_url=mlflow_url,
        dagster_url=dagster_url,
        env_server_urls=env_server_url or (),
        env_server_token=token_from(variable=SERVER_TOKEN_VARIABLE),
    )

    def on_ready(url: str) -> None:
        if as_json:
            print_json(ready_message(url), on_one_line=True)
        else:
            print(f"trajectory viewer: {url}  (Ctrl-C stops it)", flush=True)

    serve(settings, on_ready=on_ready, path=episode_url(episode) if episode else "/", opens_browser=opens)
