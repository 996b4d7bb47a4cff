"""Errors: their words, who must act, and what they carry."""

from __future__ import annotations

import pytest

from unikv import errors
from unikv.errors import (
    CapacityError,
    ConfigError,
    CopyError,
    IncompatiblePeerError,
    InternalError,
    SpecError,
    UnikvError,
    UnknownLayerError,
    explain,
)
from unikv.layer_spec import KVDtype


def test_explain_names_thing_field_value_expectation_and_cure() -> None:
    sentence = explain("layer 3", "window", 0, "an integer >= 1 token", "use None for full attention")
    assert sentence == "layer 3: window is 0, expected an integer >= 1 token; use None for full attention"


def test_explain_shows_enum_members_by_value() -> None:
    assert explain("layer 3", "dtype", KVDtype.NVFP4, "bfloat16", "x").startswith("layer 3: dtype is 'nvfp4', expected")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (10**500, "1" + 399 * "0" + "..."),
        ("x" * 1000, "'" + 399 * "x" + "..."),
        (16**5000, "a value of type int too long to show"),
        ([16**5000], "a value of type list too long to show"),
        ("x" * 398, "'" + 398 * "x" + "'"),
    ],
    ids=["integer", "text", "integer Python does not write", "list of such", "text that just fits"],
)
def test_long_values_are_cut(value: object, shown: str) -> None:
    assert explain("a", "b", value, "c", "d") == f"a: b is {shown}, expected c; d"


def test_every_error_can_be_caught_as_one() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert len(kinds) >= 11
    assert all(issubclass(kind, UnikvError) for kind in kinds)


@pytest.mark.parametrize("kind", [SpecError, ConfigError])
def test_wrong_input_is_a_value_error(kind: type[Exception]) -> None:
    assert issubclass(kind, ValueError)


def test_an_unknown_layer_is_a_key_error_with_a_readable_text() -> None:
    error = UnknownLayerError(explain("layout", "layer_id", 7, "one of 0, 1", "ask another rank"))
    assert isinstance(error, KeyError)
    assert isinstance(error, SpecError)
    assert str(error) == "layout: layer_id is 7, expected one of 0, 1; ask another rank"


def test_capacity_says_how_many_pages() -> None:
    error = CapacityError("group 0: too few", needed_pages=5, free_pages=2)
    assert (error.needed_pages, error.free_pages, str(error)) == (5, 2, "group 0: too few")


def test_a_refused_peer_gets_every_mismatch() -> None:
    error = IncompatiblePeerError("peers differ:", mismatches=["heads 8 != 4", "dtype bfloat16 != float16"])
    assert error.mismatches == ("heads 8 != 4", "dtype bfloat16 != float16")
    assert str(error) == "peers differ:\n  heads 8 != 4\n  dtype bfloat16 != float16"


def test_our_bug_tells_its_story() -> None:
    error = InternalError("no transition", story=["created", "closed"])
    assert error.story == ("created", "closed")
    assert str(error) == "no transition\n  created\n  closed"
    assert str(InternalError("bare")) == "bare"


@pytest.mark.parametrize("in_doubt", [True, False])
def test_a_failed_copy_says_whether_bytes_may_still_land(in_doubt: bool) -> None:
    assert CopyError("lost", in_doubt=in_doubt).in_doubt is in_doubt
