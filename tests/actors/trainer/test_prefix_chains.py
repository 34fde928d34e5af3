from collections.abc import Iterator, Sequence
from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from flexmarl.actors.trainer.padding import TokenRow
from flexmarl.actors.trainer.prefix_chains import prefix_chains

# Two tokens and short samples: many begin with each other, and many are equal.
short = st.text("ab", min_size=1, max_size=3)
samples_of_any_kind = st.lists(st.tuples(short, short), max_size=7)


@st.composite
def conversations(draw: st.DrawFn) -> list[tuple[str, str]]:
    """Turns of which each extends one before it, or begins a conversation."""
    turns: list[tuple[str, str]] = []
    for _ in range(draw(st.integers(1, 7))):
        before = draw(st.sampled_from(["", *("".join(turn) for turn in turns)]))
        turns.append((before + draw(short), draw(short)))
    return draw(st.permutations(turns))


def chains_of(samples: Sequence[tuple[str, str]]) -> list[list[int]]:
    texts = [(prompt + completion).encode() for prompt, completion in samples]
    return prefix_chains(texts, [len(prompt) for prompt, _ in samples])


def extends(later: tuple[str, str], earlier: tuple[str, str]) -> bool:
    return later[0].startswith("".join(earlier))


def computed(samples: Sequence[tuple[str, str]], chains: Sequence[Sequence[int]]) -> int:
    return sum(len("".join(samples[chain[-1]])) for chain in chains)


def divisions(samples: Sequence[tuple[str, str]], numbers: list[int]) -> Iterator[list[list[int]]]:
    """All divisions of ``numbers``, by length, into chains."""
    if not numbers:
        yield []
        return
    *others, last = numbers
    for chains in divisions(samples, others):
        yield [*chains, [last]]
        for place, chain in enumerate(chains):
            if extends(samples[last], samples[chain[-1]]):
                yield [*chains[:place], [*chain, last], *chains[place + 1 :]]


@given(st.one_of(samples_of_any_kind, conversations()))
@example([("a", "b"), ("ab", "a"), ("ab", "b"), ("aba", "a"), ("a", "b")])
def test_chains_compute_the_fewest_tokens_that_any_division_does(samples: list[tuple[str, str]]) -> None:
    chains = chains_of(samples)
    assert sorted(number for chain in chains for number in chain) == list(range(len(samples)))
    assert all(extends(samples[b], samples[a]) for chain in chains for a, b in pairwise(chain))
    by_length = sorted(range(len(samples)), key=lambda number: len("".join(samples[number])))
    least = min(computed(samples, chains) for chains in divisions(samples, by_length))
    assert computed(samples, chains) == least


def test_a_second_continuation_is_a_chain_of_its_own() -> None:
    turns = [("q", "1"), ("q1r", "2"), ("q1r2s", "3"), ("q1r2t", "4"), ("q1u", "5")]
    assert chains_of(turns) == [[0, 1, 2], [3], [4]] or chains_of(turns) == [[0, 1, 3], [2], [4]]


def test_equal_first_turns_have_a_continuation_each() -> None:
    turns = [("q", "1"), ("q", "1"), ("q1r", "2"), ("q1s", "2")]
    assert sorted(map(len, chains_of(turns))) == [2, 2]


def test_a_completion_that_another_prompt_cuts_is_not_its_prefix() -> None:
    assert chains_of([("q", "12"), ("q1", "2r")]) == [[0], [1]]


def test_without_prefixes_the_chains_are_the_samples_in_their_order() -> None:
    rows: list[TokenRow] = [((5, 1), (2,)), ((3,), (1, 1)), ((5, 1), (3,)), ((5, 2), (2,))]
    tokens = [bytes(prompt + completion) for prompt, completion in rows]
    assert prefix_chains(tokens, [len(prompt) for prompt, _ in rows]) == [[0], [1], [2], [3]]
    assert prefix_chains([], []) == []
