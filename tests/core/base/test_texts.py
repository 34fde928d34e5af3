"""Control characters are shown, and everything else stays."""

import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from flexmarl.core.base.texts import printable

# The order of reading: Unicode Standard Annex 9, table 4 and 2.4 to 2.6.
TURNING = [*map(chr, (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)))]
OBEYED = st.sampled_from(
    [*map(chr, range(0x20)), *map(chr, range(0x7F, 0xA0)), *TURNING, "\ud800", "\udcff", "\udfff"]
)
TEXTS = st.lists(
    st.one_of(OBEYED, st.characters(), st.sampled_from(["\x1b[2J", "\x1b]0;title\x07", "\x9b31m"]))
)


@given(TEXTS.map("".join))
def test_nothing_is_left_that_a_terminal_obeys(text: str) -> None:
    shown = printable(text)
    assert not [char for char in shown if unicodedata.category(char) in ("Cc", "Cs") and char not in "\n\t"]
    assert not set(shown) & set(TURNING)
    shown.encode()  # no half of a surrogate is left
    assert printable(shown) == shown


@given(
    st.text(
        st.characters(
            exclude_categories=("Cc", "Cf", "Cs", "Zl", "Zp"), include_characters="\n\t\u200c\u200d"
        )
    )
)
def test_other_text_stays(text: str) -> None:
    assert printable(text) == text


def test_the_form_is_that_of_an_escape() -> None:
    assert printable("a\nb\tc\r\x1b[1m \x9b \u202e \ud83d") == "a\nb\tc\\x0d\\x1b[1m \\x9b \\u202e \\ud83d"
