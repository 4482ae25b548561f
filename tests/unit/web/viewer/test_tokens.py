"""Token ids as text, each with its log-probability, by the turn that it belongs to."""

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from viewer_samples import SFT, SOLVING

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.web.viewer.episode import Episodes
from osworld_pipeline.web.viewer.index import EpisodeIndex
from osworld_pipeline.web.viewer.settings import NotFoundError
from osworld_pipeline.web.viewer.tokens import load_vocabulary, pieces, sampled_runs, tokens_by_step

BYTES = {byte: bytes([byte]) for byte in range(256)} | {300: b"<|im_end|>"}


@given(st.text(max_size=20))
def test_pieces_of_a_text_are_the_text(text: str) -> None:
    assert "".join(pieces(list(text.encode("utf-8", "ignore")), BYTES)) == text.encode("utf-8", "ignore").decode()


@given(st.lists(st.sampled_from([*range(256), 300, 9_999]), max_size=20))
def test_every_token_has_a_piece_for_any_ids(ids: list[int]) -> None:
    assert len(pieces(ids, BYTES)) == len(ids)


def test_turns_are_separated_by_the_prompt_between_them() -> None:
    row = {"token_ids": [9, 1, 2, 9, 3], "response_mask": [0, 1, 1, 0, 1], "sampled_logprobs": [0, -1, -2, 0, -3]}
    assert sampled_runs([row]) == [([1, 2], [-1, -2]), ([3], [-3])]


def test_sequences_of_a_window_are_separated_without_a_prompt_between_them() -> None:
    first = {"token_ids": [9, 1], "response_mask": [0, 1], "sampled_logprobs": [0, -1]}
    second = {"token_ids": [2, 3], "response_mask": [1, 1], "sampled_logprobs": [-2, -3]}
    assert sampled_runs([first, second]) == [([1], [-1]), ([2, 3], [-2, -3])]


def test_tokens_of_a_stored_episode_decode_to_its_responses(sample_state: StateDir, sample_index: EpisodeIndex) -> None:
    episode_id = f"eval-{SFT}-0123456789ab-desktop-basics-click_button-0001-s0"
    checkpoint_id, sequences = Episodes(sample_state, sample_index).tokens(episode_id)
    assert checkpoint_id == SFT
    steps = tokens_by_step(sequences, sample_state.checkpoints / SFT / "tokenizer.json")
    assert ["".join(token.text for token in step) for step in steps] == [turn.response for turn in SOLVING]
    assert {token.logprob for token in steps[0]} == {-5.5, -0.9, -0.02}


def test_a_missing_or_invalid_vocabulary_is_reported(tmp_path) -> None:
    with pytest.raises(NotFoundError, match="no tokenizer"):
        load_vocabulary(tmp_path / "tokenizer.json")
    for content in ({"model": {"type": "Unigram", "vocab": [["a", 1]]}}, {}, {"model": {"vocab": {"中": 1}}}):
        path = tmp_path / f"{len(str(content))}.json"
        path.write_bytes(orjson.dumps(content))
        with pytest.raises(NotFoundError, match="byte-level"):
            load_vocabulary(path)


def test_an_episode_without_tokens_is_reported(tmp_path) -> None:
    with pytest.raises(NotFoundError, match="no token ids"):
        tokens_by_step([], tmp_path)
