"""What a page consists of, as a browser would read it."""

import re
from html.parser import HTMLParser
from pathlib import Path


class Reader(HTMLParser):
    """Collects the elements, attributes and texts of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.text += " "
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += data


def read_page(path: Path) -> Reader:
    reader = Reader()
    reader.feed(path.read_text())
    reader.text = re.sub(r"\s+", " ", reader.text)
    return reader
