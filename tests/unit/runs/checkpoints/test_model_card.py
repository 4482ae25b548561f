"""The licence of weights from elsewhere: read from their model card, or unknown."""

from pathlib import Path

import pytest

from osworld_pipeline.runs.checkpoints.model_card import MAX_BYTES, card_licence


@pytest.mark.parametrize(
    ("card", "expected"),
    [
        ("---\nlicense: apache-2.0\ntags: [a]\n---\n# Model\n", "apache-2.0"),
        ("---\nlicense: other\nlicense_name: qwen-research\n---\n", "qwen-research"),
        ("---\nlicense: other\n---\n", "other"),
        ("---\nlicense: [mit, apache-2.0]\n---\n", None),
        ("---\nlicense:\n---\n", None),
        ("---\ntags: [a]\n---\n", None),
        ("---\n- a list\n---\n", None),
        ("---\nlicense: 'open\n---\n", None),
        ("---\nlicense: " + "[" * 5_000 + "\n---\n", None),
        ("---\nlicense: " + "m" * 101 + "\n---\n", None),
        ("# Model\n\nlicense: mit\n", None),
        ("", None),
        ("---\nlicense: mit\n---\n" + " " * MAX_BYTES, None),
    ],
)
def test_a_card_names_one_licence_or_none(tmp_path: Path, card: str, expected: str | None) -> None:
    (tmp_path / "README.md").write_text(card)
    assert card_licence(tmp_path) == expected


def test_a_folder_without_a_readable_card_names_none(tmp_path: Path) -> None:
    assert card_licence(tmp_path) is None
    (tmp_path / "README.md").write_bytes(b"---\nlicense: \xff\xfe\n---\n")
    assert card_licence(tmp_path) is None
