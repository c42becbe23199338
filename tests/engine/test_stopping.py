from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.tiny import request
from spillover.engine import Withheld, cut
from spillover.engine.stopping import StopRule

PIECES = {1: "Hello", 2: " wor", 3: "ld", 4: "", 5: "!\n", 6: "\nBye"}


class Pieces:
    """Token ids as the texts above."""

    def push(self, token_id: int) -> str:
        return PIECES[token_id]


def finishes(tokens, **more):
    rule = StopRule(request("r", (1,), **{"count": 10, **more}), Pieces)
    return [rule.push(token) for token in tokens]


def test_stop_id_ends_the_answer():
    assert finishes([1, 2], stop_ids=frozenset([2])) == [None, "stop"]


def test_limit_ends_the_answer():
    assert finishes([1, 2], count=2) == [None, "length"]


def test_stop_string_inside_one_token():
    assert finishes([1, 2, 3], stop=("ell",))[0] == "stop"


def test_stop_string_across_three_tokens_one_of_them_silent():
    assert finishes([1, 2, 4, 3, 5], stop=("o world",)) == [None, None, None, "stop", None]


def test_stop_string_across_a_border_of_single_characters():
    assert finishes([5, 6], stop=("\n\n",)) == [None, "stop"]


def test_one_character_stop_string():
    assert finishes([1, 5], stop=("!",)) == [None, "stop"]


def test_earliest_stop_string_cuts_the_text():
    assert cut("Hello world!", ("!", "wor")) == "Hello "
    assert cut("Hello", ("!", "")) == "Hello"


@given(
    pieces=st.lists(st.text("ab🙂", max_size=4), max_size=12),
    stop=st.lists(st.text("ab🙂", min_size=1, max_size=4), max_size=3),
)
def test_withheld_pieces_join_to_what_is_before_the_stop_string(pieces, stop):
    """At every moment what was shown is a beginning of the end result: nothing has to be taken back."""
    texts = ["".join(pieces[:count]) for count in range(len(pieces) + 1)]
    said = next((text for text in texts if any(one in text for one in stop)), texts[-1])
    whole, withheld, shown = cut(said, stop), Withheld(stop), ""
    for piece in pieces:  # an answer ends with the piece that completes a stop string; the rest is no matter
        shown += withheld.push(piece)
        assert whole.startswith(shown)
    assert shown + withheld.end() == whole


def test_no_more_is_withheld_than_may_begin_a_stop_string():
    withheld = Withheld(["<end>", "stop"])
    assert [withheld.push(text) for text in ("a <", "e", "x ", "st", "ar")] == ["a ", "", "<ex ", "", "star"]
    assert (withheld.push("<end"), withheld.end(), withheld.end()) == ("", "<end", "")
