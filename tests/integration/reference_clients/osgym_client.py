"""OSGym's worker client, unchanged: its own test script with fewer steps and shorter waits, then an episode that solves
its task.

Run in a folder laid out as its examples/ is: ../config.yaml, and env_configs/libreoffice_calc/ with the task.
Arguments: the checkout, a line that solves the task in a terminal."""

import base64
import io
import re
import sys
from pathlib import Path

import yaml
from PIL import Image

SHORTER = (
    ("n_steps = 100000", "n_steps = 3"),
    ("wait_time_range = (10, 40)", "wait_time_range = (0.1, 0.3)"),
    ("time.sleep(5)", "time.sleep(0.2)"),
)
"""What is bounded of its script; everything else runs as it stands."""


def run_its_script(examples: Path) -> None:
    script = (examples / "test_osgym.py").read_text()
    for old, new in SHORTER:
        assert script.count(old) == 1, f"the script has changed: {old}"
        script = script.replace(old, new)
    exec(compile(script, "test_osgym.py", "exec"), {"__name__": "__main__"})


def solve(line: str) -> None:
    from osgym import OSGymEnvWorker

    port = yaml.safe_load(Path("../config.yaml").read_text())["ports"][0]
    env = OSGymEnvWorker({
        "server_url": f"http://localhost:{port}", "json_dir": "./env_configs/libreoffice_calc", "img_h": 1080,
        "img_w": 1920, "max_step": 100, "max_hist": 10, "timeout": 1000,
    })  # fmt: skip
    env.reset()
    actions = ("click(500,500)", "hotkey(ctrl,alt,t)", "wait()", f"type({line})", "hotkey(enter)", "wait()", "finish()")
    for action in actions:
        reported, _ = env.step(f"<|think_start|>on it<|think_end|><|action_start|>{action}<|action_end|>")
        print(f"solving: {reported['action']} -> reward {reported['reward']}, done {reported['done']}")
    assert reported["reward"] == 1.0
    images = re.findall(r"<\|vision_start\|>(.*?)<\|vision_end\|>", reported["obs"])
    assert Image.open(io.BytesIO(base64.b64decode(images[-1]))).size == (1260, 700)


def main(checkout: Path, line: str) -> None:
    examples = checkout / "examples"
    sys.path.insert(0, str(examples))
    run_its_script(examples)
    solve(line)
    print("osgym: ok")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
