"""The index of responses against dictionaries and sets that hold all of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvbench.runs.index import Key, ResponseIndex

KEYS = st.tuples(st.sampled_from("abc"), st.sampled_from("xyz"), st.integers(0, 3), st.just(0))


@given(st.lists(st.tuples(KEYS, st.booleans()), max_size=40))
def test_it_finds_what_was_added_last(added: list[tuple[Key, bool]]) -> None:
    index = ResponseIndex()
    done = index.done()
    places, answered = {}, {}
    for line, (key, fine) in enumerate(added):
        index.add(key, (1000 * line, 10 + line), done=fine)
        places[key], answered[key] = (1000 * line, 10 + line), fine
    known = {key for key, fine in answered.items() if fine}
    assert done == known and len(done) == len(known) and set(done) == known
    assert all((key in done) == fine for key, fine in answered.items())
    assert index.all_places() == list(places.values())
    for cell in "abcd":
        assert index.places(cell) == [place for key, place in places.items() if key[0] == cell]


def test_what_is_no_key_is_not_done() -> None:
    index = ResponseIndex()
    index.add(("a", "x", 0, 0), (0, 10), done=True)
    done = index.done()
    for other in (("b", "x", 0, 0), ("a", "y", 0, 0), ("a", "x", 0, 1), ("a", "x"), "a"):
        assert other not in done
