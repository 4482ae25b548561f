"""The verbs that the probe reads."""

import time


class SetupController:
    def __init__(self, **_: object) -> None: ...

    def setup(self, config: list[dict], use_proxy: bool = False) -> bool:
        for verb in config:
            getattr(self, f"_{verb['type']}_setup")(**verb["parameters"])
        return True

    def _sleep_setup(self, seconds: float) -> None:
        time.sleep(seconds)

    def _execute_setup(self, command: str, stdout: str = "") -> None:
        raise RuntimeError(f"Setup step 1 failed: {command}")

    def _download_setup(self, files: list[dict]) -> None: ...

    def _upload_file_setup(self, files: list[dict]) -> None:
        for file in files:
            with open(file["local_path"]) as source:
                UPLOADED.append(source.read())

    def _googledrive_setup(self, **_: object) -> None: ...

    def _replay_setup(self, trajectory: str) -> None:
        """A verb that is declared and not implemented."""
        raise NotImplementedError


UPLOADED: list[str] = []
