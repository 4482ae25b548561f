"""A run's token opens the server it was made for until it ends, and no other."""

import base64
import hashlib
import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from osworld_pipeline.wire.run_tokens import ENDED, make_run_token, why_invalid

SECRET = "3f2a9c1b7d10"


def test_a_run_token_is_accepted_until_it_ends() -> None:
    token = make_run_token(SECRET, run="5e0c", ends_at=1_000.0).encode()
    assert why_invalid(SECRET, token, now=999.0) is None
    assert str(why_invalid(SECRET, token, now=1_000.0)).startswith(ENDED)


def test_a_run_token_names_its_run_and_its_end_and_is_an_hmac_of_both() -> None:
    kind, run, ends_at, mac = make_run_token(SECRET, run="nightly 7", ends_at=1_000.9).split(".")
    assert (kind, base64.urlsafe_b64decode(run), ends_at) == ("run1", b"nightly 7", "1000")
    text = f"osworld-pipeline run token 1\nrun1.{run}.1000"
    assert mac == hmac.digest(SECRET.encode(), text.encode(), hashlib.sha256).hex()
    assert SECRET not in "".join((kind, run, ends_at, mac))


def test_another_servers_token_and_a_changed_claim_are_refused() -> None:
    token = make_run_token(SECRET, run="a", ends_at=1_000.0)
    assert why_invalid("another", token.encode(), now=0.0) == ""
    kind, run, ends_at, mac = token.split(".")
    for changed in (
        f"{kind}.{run}.9999.{mac}", f"{kind}.Yg.{ends_at}.{mac}", f"run2.{run}.{ends_at}.{mac}",
        f"{kind}.{run}.{ends_at}", f"{token}.", SECRET, "",
    ):  # fmt: skip
        assert why_invalid(SECRET, changed.encode(), now=0.0) == "", changed


@given(st.binary(max_size=200) | st.lists(st.binary(max_size=20), min_size=4, max_size=4).map(b".".join))
def test_any_other_bytes_are_refused(text: bytes) -> None:
    assert why_invalid(SECRET, text, now=0.0) == ""
    assert why_invalid(SECRET, b"run1." + text, now=0.0) == ""


@pytest.mark.parametrize("run", ["", "ü.\n", "x" * 500])
def test_any_run_name_gives_a_valid_token(run: str) -> None:
    token = make_run_token(SECRET, run=run, ends_at=1e10)
    assert token.isascii()
    assert token.isprintable()
    assert why_invalid(SECRET, token.encode()) is None
