"""The queue of prompts: which requests are admitted together, and when."""

from flexmarl.actors.inference.engines.embedded.prefix_tree import Prefix
from flexmarl.actors.inference.engines.embedded.prompt_queue import (
    ADMIT_STEPS,
    Admitted,
    PromptQueue,
    Room,
)
from flexmarl.actors.inference.engines.engine import EngineRequest


def request(name: str, prompt: int | tuple[int, ...], new: int = 10) -> EngineRequest:
    tokens = (ord(name),) * prompt if isinstance(prompt, int) else prompt
    return EngineRequest(name, tokens, 0, 1.0, new)


def queue_of(*requests: EngineRequest, chunk: int = 100, known: int = 0) -> PromptQueue:
    queue = PromptQueue(chunk, lambda prompt: Prefix(known if len(prompt) > known else 0))
    for one in requests:
        queue.add(one)
    return queue


def names(group: list[Admitted]) -> str:
    return "".join(admitted.request.request_id for admitted in group)


def room(rows: int = 0, columns: int = 0, max_rows: int = 8, tokens: int = 10_000) -> Room:
    return Room(rows, columns, max_rows, tokens)


def test_a_group_fills_a_chunk_with_its_padding() -> None:
    queue = queue_of(request("a", 10), request("b", 30), request("c", 30), request("d", 30))
    assert names(queue.take(room(), True)) == "abc"  # three prompts of 30
    assert names(queue.take(room(), True)) == "d" and not len(queue)


def test_equal_prompts_count_once() -> None:
    equal = (7,) * 60
    queue = queue_of(request("a", equal), request("b", 60), request("c", equal))
    assert names(queue.take(room(), True)) == "a"
    queue = queue_of(request("a", equal), request("c", equal), request("b", 60))
    assert names(queue.take(room(), True)) == "ac"


def test_a_prompt_that_begins_like_another_waits_for_what_that_one_leaves() -> None:
    common = tuple(range(20))
    queue = queue_of(request("a", (*common, 1)), request("b", (*common, 2)), request("c", (*common, 2)))
    assert names(queue.take(room(), True)) == "a"
    assert names(queue.take(room(), True)) == "bc"
    alone = PromptQueue(100, None)  # nothing is kept
    for one in (request("a", (*common, 1)), request("b", (*common, 2))):
        alone.add(one)
    assert names(alone.take(room(), True)) == "ab"


def test_a_prompt_longer_than_a_chunk_comes_alone_and_shorter_ones_pass_the_next() -> None:
    queue = queue_of(request("a", 20), request("L", 101), request("b", 20), request("M", 300))
    assert names(queue.take(room(), True)) == "a"
    (long,) = queue.take(room(), True)
    assert long.request.request_id == "L" and queue.is_long(long)
    queue.add(request("N", 300))
    queue.add(request("c", 20))
    assert names(queue.take(room(), False)) == "bc"
    assert queue.take(room(), False) == []
    assert names(queue.take(room(), True)) == "M" and names(queue.take(room(), True)) == "N"


def test_only_the_rest_behind_a_known_beginning_is_computed() -> None:
    queue = queue_of(request("a", 150), request("b", 151), known=90)
    (first,) = queue.take(room(), True)
    assert not queue.is_long(first)
    assert (first.rest.start, len(first.rest.tokens), first.rest.end) == (90, 60, 150)


def test_rows_and_memory_bound_the_group_and_keep_the_order() -> None:
    requests = [request(name, 10, new) for name, new in (("a", 10), ("b", 90), ("c", 10))]
    assert names(queue_of(*requests).take(room(max_rows=2), True)) == "ab"
    assert names(queue_of(*requests).take(room(rows=1, max_rows=2), True)) == "a"
    # rows are as long as the longest, in steps of 8 columns: with b, each needs 104
    queue = queue_of(*requests)
    assert names(queue.take(room(tokens=207), True)) == "a"
    assert names(queue.take(room(rows=1, columns=24, tokens=207), True)) == ""  # c does not pass b
    assert names(queue.take(room(rows=1, columns=24, tokens=208), True)) == "b"
    assert names(queue.take(room(rows=2, columns=104, tokens=312), True)) == "c"


def test_requests_wait_for_company_but_not_for_ever() -> None:
    queue = queue_of(request("a", 10))
    assert [queue.is_due(20, 32) for _ in range(ADMIT_STEPS)] == [False] * (ADMIT_STEPS - 1) + [True]
    assert not queue.is_due(20, 32)
    assert queue.is_due(8, 32)  # an eighth
    assert not queue.is_due(32, 32)  # no free row


def test_what_is_removed_or_put_back() -> None:
    queue = queue_of(request("a", 10), request("b", 10), request("c", 10))
    assert queue.remove("b") and not queue.remove("b") and len(queue) == 2
    group = queue.take(room(), True)
    queue.add(request("d", 10))
    queue.put_back(group)
    assert names(queue.take(room(), True)) == "acd"
