"""Searches one parser for a finding: `python -m fuzz.search NAME SECONDS FOLDER`. Coverage guides the mutations
(atheris, which is libFuzzer for Python). FOLDER keeps the corpus; an input that breaks the parser is written there as
`crash-*`, one that takes too long as `timeout-*`, and the search ends with it."""

import gc
import sys
from pathlib import Path

import atheris

MAX_INPUT_BYTES = 16 * 1024
MEMORY_LIMIT_MB = 3072

with atheris.instrument_imports(include=["osworld_pipeline", "env_server"], enable_loader_override=False):
    from fuzz.parser import HARD_VALUES, INPUT_LIMIT_S
    from fuzz.parsers import PARSERS


def main(name: str, seconds: str, place: str) -> None:
    parser, folder = PARSERS[name], Path(place)
    corpus = folder / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    hard = (data for value in HARD_VALUES.values() for data in parser.hard_inputs(value))
    for number, seed in enumerate((*parser.seeds, *hard)):
        (corpus / f"seed-{number}").write_bytes(seed)
    for case in parser.cases:
        (corpus / f"case-{case.name}").write_bytes(case.read_bytes())
    options = [
        f"-max_total_time={seconds}",
        f"-timeout={INPUT_LIMIT_S}",
        f"-rss_limit_mb={MEMORY_LIMIT_MB}",
        f"-max_len={MAX_INPUT_BYTES}",
        f"-artifact_prefix={folder}/",
        "-print_final_stats=1",
        "-verbosity=1",
    ]
    if parser.words:
        (folder / "words").write_text("".join(f'"{_escaped(word)}"\n' for word in parser.words))
        options.append(f"-dict={folder / 'words'}")
    gc.freeze()
    atheris.Setup([sys.argv[0], *options, str(corpus)], parser.refuses)
    atheris.Fuzz()


def _escaped(word: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in word.encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
