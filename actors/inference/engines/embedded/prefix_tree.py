"""Keys and values of earlier prompts and answers, found again by the tokens that a new prompt begins with.

A radix tree: every edge has some tokens and their keys and values, so that a common beginning is in memory once. The
least recently used ends are evicted first (Zheng et al., "SGLang: Efficient Execution of Structured Language Model
Programs", arXiv 2312.07104, section 3).
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from torch import Tensor

KeyValues = list[Tensor]
"""One tensor per buffer of the cache: keys and values [tokens, kv_heads, head_dim], and routes if there are any."""


@dataclass(eq=False, slots=True)
class _Edge:
    tokens: tuple[int, ...]
    states: KeyValues
    parent: "_Edge | None"
    children: "dict[int, _Edge]" = field(default_factory=dict)  # by their first tokens


@dataclass(frozen=True, slots=True)
class Prefix:
    """The first ``tokens`` tokens of a prompt, with the keys and values of consecutive ``pieces`` of it."""

    tokens: int = 0
    pieces: tuple[KeyValues, ...] = ()


class PrefixTree:
    """At most ``capacity_tokens`` tokens; which ones are kept is decided by their last use."""

    def __init__(self, capacity_tokens: int) -> None:
        self._capacity = capacity_tokens
        self._root = _Edge((), [], None)
        # Least recently used first. A child is never used after its parent, so the first one has no children.
        self._recent: OrderedDict[_Edge, None] = OrderedDict()
        self.tokens = 0
        """Tokens whose keys and values are stored now."""

    def match(self, tokens: Sequence[int]) -> Prefix:
        """The longest beginning of ``tokens`` that is stored. Its tensors stay valid after an eviction."""
        path = self._walk(tokens)
        self._touch(path)
        pieces = tuple([state[:agreed] for state in edge.states] for edge, agreed in path)
        return Prefix(sum(agreed for _, agreed in path), pieces)

    def insert(self, tokens: Sequence[int], copied: Callable[[int, int], KeyValues]) -> None:
        """Stores what is missing of ``tokens``; ``copied(start, end)`` returns keys and values of these positions.

        Does nothing if ``tokens`` do not fit the capacity.
        """
        if len(tokens) > self._capacity:
            return
        path = self._walk(tokens)
        self._touch(path)
        start = sum(agreed for _, agreed in path)
        if start == len(tokens):
            return
        parent = self._root
        if path:
            edge, agreed = path[-1]
            parent = edge if agreed == len(edge.tokens) else self._split(edge, agreed)
        self._evict(len(tokens) - start)
        new = _Edge(tuple(tokens[start:]), copied(start, len(tokens)), parent)
        parent.children[new.tokens[0]] = new
        self.tokens += len(new.tokens)
        self._recent[new] = None
        self._touch([*path[:-1], (parent, 0)] if path else [])

    def limit(self, capacity_tokens: int) -> None:
        """Changes the capacity; what does not fit any more is evicted."""
        self._capacity = capacity_tokens
        self._evict(0)

    def clear(self) -> None:
        """Forgets everything: under new weights the keys and values of earlier ones are wrong."""
        self._root.children.clear()
        self._recent.clear()
        self.tokens = 0

    def _walk(self, tokens: Sequence[int]) -> list[tuple[_Edge, int]]:
        """The edges along ``tokens``, with the number of tokens that agree; only the last one may agree in part."""
        path: list[tuple[_Edge, int]] = []
        edge, at = self._root, 0
        while at < len(tokens) and (child := edge.children.get(tokens[at])) is not None:
            agreed = _equal_tokens(child.tokens, tokens, at)
            path.append((child, agreed))
            if agreed < len(child.tokens):
                break
            edge, at = child, at + agreed
        return path

    def _touch(self, path: Sequence[tuple[_Edge, int]]) -> None:
        for edge, _ in reversed(path):
            self._recent.move_to_end(edge)

    def _split(self, edge: _Edge, at: int) -> _Edge:
        """Divides an edge; returns the first part. Both get memory of their own, so that an eviction frees it."""
        assert edge.parent is not None
        first = _Edge(edge.tokens[:at], [state[:at].clone() for state in edge.states], edge.parent)
        edge.parent.children[first.tokens[0]] = first
        edge.tokens, edge.states = edge.tokens[at:], [state[at:].clone() for state in edge.states]
        edge.parent = first
        first.children[edge.tokens[0]] = edge
        self._recent[first] = None
        return first

    def _evict(self, needed: int) -> None:
        while self._recent and self.tokens + needed > self._capacity:
            edge, _ = self._recent.popitem(last=False)
            assert edge.parent is not None and not edge.children
            del edge.parent.children[edge.tokens[0]]
            self.tokens -= len(edge.tokens)


def _equal_tokens(edge: tuple[int, ...], tokens: Sequence[int], at: int) -> int:
    """The number of tokens of ``edge`` that equal ``tokens`` from ``at`` on."""
    if tokens[at : at + len(edge)] == edge:
        return len(edge)
    pairs = zip(edge, islice(tokens, at, None), strict=False)
    return next(
        (number for number, (ours, theirs) in enumerate(pairs) if ours != theirs),
        min(len(edge), len(tokens) - at),
    )
