"""A whole server over desktops in memory, as a process of its own; its argument is the folder of its ready file."""

import io
import sys
from pathlib import Path

from fake_desktops import FakeDesktop, FakeProvider
from PIL import Image

from env_server.main import make_drivers
from env_server.server_settings import ServerSettings
from env_server.serving import bind, run_server


def main(folder: Path) -> None:
    settings = ServerSettings.from_environment(
        {}, port=0, num_replicas=4, queue_timeout_s=0.5, ready_file=folder / "ready.json", drain_timeout_s=0.0
    )
    provider = FakeProvider()
    provider.prepare = _give_a_picture
    with bind(settings) as listener:
        run_server(settings, provider, make_drivers(settings), listener)


def _give_a_picture(desktop: FakeDesktop) -> None:
    picture = io.BytesIO()
    Image.new("RGB", (64, 48)).save(picture, "PNG")
    desktop.pictures = dict.fromkeys(("png", "jpeg", "webp"), picture.getvalue())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
