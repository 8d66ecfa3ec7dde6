"""Stop strings are found where a search of the whole text finds them, and nothing that may begin one gets out."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.stop_strings import StopStringMatcher

STOPS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=5)


def first_match(text: str, stops: list[str]) -> tuple[str, int] | None:
    """Brute force: the first prefix of the text that ends with a stop string, and the longest one it ends with."""
    for end in range(len(text) + 1):
        if found := [stop for stop in stops if text[:end].endswith(stop)]:
            return max(found, key=len), end
    return None


def longest_beginning(text: str, stops: list[str]) -> int:
    """Brute force: characters at the end of the text that begin a stop string."""
    beginnings = {stop[:n] for stop in stops for n in range(len(stop))}
    return max(n for n in range(len(text) + 1) if text[len(text) - n :] in beginnings)


@given(pieces=st.lists(st.text("ab", max_size=6)), stops=STOPS)
def test_any_pieces_give_what_a_search_of_the_whole_text_gives(pieces: list[str], stops: list[str]) -> None:
    matcher = StopStringMatcher(stops)
    seen = ""
    for piece in pieces:
        match = matcher.feed(piece)
        expected = first_match(seen + piece, stops)
        if match is None:
            assert expected is None
            seen += piece
            assert matcher.held == longest_beginning(seen, stops)
        else:
            assert expected == (match.stop_string, len(seen) + match.end)
            return


def test_of_several_that_end_together_the_longest_wins() -> None:
    match = StopStringMatcher(["c", "bc", "abc", "xabc"]).feed("..abc")
    assert match is not None
    assert (match.stop_string, match.end) == ("abc", 5)


def test_the_first_to_be_complete_wins_over_one_that_began_earlier() -> None:
    match = StopStringMatcher(["abcd", "bc"]).feed("abcd")
    assert match is not None
    assert match.stop_string == "bc"


def test_without_stop_strings_nothing_matches_and_nothing_is_held() -> None:
    matcher = StopStringMatcher([])
    assert matcher.feed("anything") is None
    assert matcher.held == 0
