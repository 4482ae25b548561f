"""The version of getters and metrics follows their code."""

import pytest

from osworld_pipeline.task_schema.getters import GETTERS
from osworld_pipeline.task_schema.metrics import METRICS
from osworld_pipeline.task_schema.version import digested_files, without_declarations

GRADED = '''
@metric("text", "rules", example=(COMMAND, {"expected": "milk"}))
def same(result: str | None, *, expected: Annotated[str, Rule("the text äöü")] = "a") -> float:
    """1 if it is the same text."""
    return float(result == expected)  # "the text"
'''


@pytest.mark.parametrize(
    ("old", "new", "is_same"),
    [
        ("milk", "bread and butter", True), ("the text äöü", "another text", True), ("1 if it", "One if\nit", True),
        ("str | None", "str", True), ("==", "!=", False), ('= "a"', '= "b"', False), ("result:", "found:", False),
    ],
)  # fmt: skip
def test_version_follows_code_and_not_the_texts_of_declarations(old: str, new: str, is_same: bool) -> None:
    before, after = (without_declarations(text.encode()) for text in (GRADED, GRADED.replace(old, new, 1)))
    assert (before == after) == is_same


def test_the_digested_code_contains_no_text_of_the_documentation_page() -> None:
    files = [path for path in digested_files() if path.name != "reading.py"]
    code = " ".join(b" ".join(without_declarations(path.read_bytes()) for path in files).decode().split())
    parts = [*GETTERS.values(), *METRICS.values()]
    texts = [text for part in parts for text in (part.about, *(key.about for key in part.keys)) if len(text) > 12]
    assert len(texts) > 60
    assert [text for text in texts if text in code] == []
    assert 'startswith("approx")' in code
