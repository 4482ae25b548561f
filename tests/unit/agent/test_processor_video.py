import json
from pathlib import Path
from typing import Any

from osworld_pipeline.agent.processor import VIDEO_FILE, load_processor


def test_a_saved_processor_holds_the_video_part_that_servers_want(processor: Any, tmp_path: Path) -> None:
    processor.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / VIDEO_FILE).read_text())
    assert settings["video_processor_type"] == "Qwen3VLVideoProcessor"


def test_a_checkpoint_s_own_video_part_is_kept_when_it_is_saved_again(processor: Any, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    processor.save_pretrained(first)
    (first / VIDEO_FILE).write_text('{"video_processor_type": "Qwen3VLVideoProcessor", "fps": 7}')
    load_processor(first).save_pretrained(second)
    assert json.loads((second / VIDEO_FILE).read_text())["fps"] == 7
