import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gguf_pp.text import StopFilter, TextStream
from tests.vocabs import stored


def pushed(stops, parts):
    """What each part lets through, what the end does, and whether it stopped."""
    stream = StopFilter(stops)
    return [stream.push(part) for part in parts], stream.flush(), stream.stopped


@pytest.mark.parametrize(
    ("stops", "parts", "shown", "rest", "stopped"),
    [
        ([], ["a", "bc"], ["a", "bc"], "", False),
        (["END"], ["abEND"], ["ab"], "", True),
        (["END"], ["aE", "N", "D", "b"], ["a", "", "", ""], "", True),
        (["END"], ["aE", "Nx"], ["a", "ENx"], "", False),
        (["END"], ["aEN"], ["a"], "EN", False),
        (["END"], ["EENE", "ND"], ["EEN", ""], "", True),
        (["aab"], ["aaa", "b"], ["a", ""], "", True),
        (["xyz", "b"], ["ab", "c"], ["a", ""], "", True),
        (["\n\n"], ["a\n", "b\n", "\nc"], ["a", "\nb", ""], "", True),
        (["🦙!"], ["hi 🦙", "!"], ["hi ", ""], "", True),
        ([""], ["text"], ["text"], "", False),
    ],
)
def test_text_is_held_back_only_while_it_may_be_a_stop_string(stops, parts, shown, rest, stopped):
    assert pushed(stops, parts) == (shown, rest, stopped)


def first_stop(stops, text):
    """The text before the stop string that is complete first, the longest of those."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


@given(
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.lists(st.text("abc", max_size=3), max_size=8),
)
@example(["abc", "b"], ["abc"])
@example(["b", "abb"], ["a", "b", "b"])
def test_what_is_shown_does_not_depend_on_how_the_text_is_cut(stops, parts):
    shown, rest, stopped = pushed(stops, parts)
    assert ("".join(shown) + rest, stopped) == first_stop(stops, "".join(parts))


@given(st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.text("abc", max_size=12))
def test_what_was_shown_could_not_have_become_a_stop_string(stops, text):
    stream, shown = StopFilter(stops), ""
    for i, letter in enumerate(text):
        shown += stream.push(letter)
        if stream.stopped:
            break
        held = text[len(shown) : i + 1]
        assert not any(shown.endswith(stop) for stop in stops)
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)


def test_after_a_stop_string_nothing_comes():
    stream = StopFilter(["."])
    assert stream.push("a.b") == "a"
    assert stream.push("c") == ""
    assert stream.flush() == ""


def test_held_text_comes_once():
    stream = StopFilter(["ab"])
    assert stream.push("xa") == "x"
    assert (stream.flush(), stream.flush()) == ("a", "")


TEXT = "Grüße, 世界! 🦙🦙 <|x|>"


def test_tokens_become_the_text_they_stand_for():
    tokenizer = stored("gpt-2")
    stream = TextStream(tokenizer, [])
    parts = [stream.push(i) for i in tokenizer.encode(TEXT)]
    assert "".join(parts) + stream.flush() == TEXT
    assert not any("\ufffd" in part for part in parts)
    assert not stream.stopped


def test_a_stop_string_is_found_across_tokens():
    tokenizer = stored("gpt-2")
    stream = TextStream(tokenizer, ["界! 🦙"])
    shown = "".join(stream.push(i) for i in tokenizer.encode(TEXT))
    assert shown == "Grüße, 世"
    assert stream.stopped
    assert stream.flush() == ""


def test_half_a_character_at_the_end_is_shown_as_unknown():
    tokenizer = stored("gpt-2")
    stream = TextStream(tokenizer, ["stop"])
    llama = tokenizer.encode("🦙")
    assert len(llama) > 1
    shown = stream.push(llama[0])
    assert shown + stream.flush() == "\ufffd"
