"""Commands for messages and pages: complete, and quoted for a POSIX shell, so that they can be pasted."""

import shlex
import shutil
import sys
from pathlib import Path

from osworld_pipeline.domain.state import StateDir

PIPELINE = "osworld-pipeline"
ENV_SERVER = "env-server"


def shell_line(program: str, *words: object) -> str:
    """A command line. If the program is not on the PATH, the line has its path next to this Python."""
    local = Path(sys.executable).with_name(program)
    is_hidden = shutil.which(program) is None and local.is_file()
    return shlex.join([str(local) if is_hidden else program, *map(str, words)])


def pipeline_line(state: StateDir, *words: object) -> str:
    """A command of `osworld-pipeline` on this state."""
    return shell_line(PIPELINE, *words, "--state", state.root)


def mlflow_line(database_uri: str, *, port: int = 5000) -> str:
    """MLflow's UI of a database."""
    return shell_line("mlflow", "ui", "--backend-store-uri", database_uri, "--port", port)
