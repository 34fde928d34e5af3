"""The simulated engine: the exact end of every request, at any rate of calls."""

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.actors.chat.byte_codec import END_OF_SEQUENCE
from flexmarl.actors.errors import PromptTooLong
from flexmarl.actors.inference.engine_times import RooflineTimes
from flexmarl.actors.inference.engines.engine import EngineRequest, Phases
from flexmarl.actors.inference.engines.simulated_step_engine import (
    SimulatedStepEngine,
    sample_answer,
)
from flexmarl.actors.inference.inference_config import SimulatedEngineConfig

FIXED = SimulatedEngineConfig(median_tokens=1e6, sigma=0.0, token_s=0.5, prompt_share=0.0)
"""Every answer is cut off at ``max_new_tokens``."""


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def request(name: str, tokens: int, prompt: int = 1) -> EngineRequest:
    return EngineRequest(name, (97,) * prompt, 1, 1.0, tokens)


def engine(
    clock: Clock, config: SimulatedEngineConfig = FIXED, max_batch: int = 8, **changes: float
) -> SimulatedStepEngine:
    return SimulatedStepEngine(config.model_copy(update={"max_batch": max_batch, **changes}), clock)


def ends(subject: SimulatedStepEngine, clock: Clock) -> dict[str, float]:
    """The end of each request, in seconds after the clock's start; the engine is called only at ``due_s``."""
    return {name: end_s for name, (end_s, _) in ends_and_phases(subject, clock).items()}


def ends_and_phases(subject: SimulatedStepEngine, clock: Clock) -> dict[str, tuple[float, Phases]]:
    """As ``ends``, with the phases of each result."""
    found = {}
    while subject.pending:
        clock.now_s = max(clock.now_s, subject.due_s)
        for result in subject.step():
            assert result.phases is not None
            found[result.request_id] = clock.now_s - 100.0, result.phases
    return found


def test_an_answer_takes_its_tokens_times_the_time_of_each() -> None:
    clock = Clock()
    subject = engine(clock)
    subject.add(request("a", 4))
    assert subject.step() == [] and subject.due_s == 102.0
    clock.now_s = math.nextafter(102.0, 0.0)
    assert subject.step() == []
    clock.now_s = 102.0
    (result,) = subject.step()
    assert len(result.tokens) == len(result.logprobs) == 4 and result.finish_reason == "length"
    assert subject.due_s == math.inf and subject.step() == []


def test_the_weights_decide_the_log_probabilities_and_nothing_else() -> None:
    answers = []
    for digest in (5, 6, 5):
        clock = Clock()
        subject = engine(clock)
        subject.weights_loaded({"state": np.array([0, digest], np.int64)})
        subject.add(request("a", 4))
        assert subject.step() == []
        clock.now_s = subject.due_s
        answers += subject.step()
    first, second, third = answers
    assert first == third and first.tokens == second.tokens
    assert np.float32(first.logprobs[0]) != np.float32(second.logprobs[0])
    assert second.logprobs == pytest.approx(first.logprobs, rel=1e-3) and len(set(second.logprobs)) == 1


def test_a_prompt_takes_its_share() -> None:
    clock = Clock()
    subject = engine(clock, prompt_share=0.25)
    subject.add(request("a", 4, prompt=8))
    subject.step()
    assert subject.due_s == 103.0


def test_a_crowd_slows_everybody_while_it_lasts() -> None:
    clock = Clock()
    subject = engine(clock, crowding=1.0)  # two together: a step takes twice as long
    subject.add(request("short", 2))
    subject.add(request("long", 4))
    subject.step()
    assert ends(subject, clock) == {"short": 2.0, "long": 3.0}


def test_who_waits_begins_at_the_moment_of_an_end() -> None:
    clock = Clock()
    subject = engine(clock, max_batch=1)
    for name, tokens in (("a", 2), ("b", 4), ("c", 6)):
        subject.add(request(name, tokens))
    subject.step()
    assert (subject.statistics().running, subject.statistics().waiting) == (1, 2)
    clock.now_s = 103.5  # b began at 101, not now
    assert [result.request_id for result in subject.step()] == ["a", "b"]
    assert subject.due_s == 106.0


def test_prompts_that_come_later_delay_a_first_token_and_an_aborted_turn_has_what_it_had() -> None:
    clock = Clock()
    subject = on_device(clock, 4)
    subject.add(request("a", 10, 40))
    subject.step()
    first_s = subject.token_due_s
    clock.now_s += (first_s - clock.now_s) / 2  # within its prompt
    subject.add(request("b", 10, 50))
    subject.step()
    assert subject.token_due_s > first_s
    clock.now_s = delayed_s = subject.token_due_s
    b = subject.abort("b")
    assert b is not None and b.phases is not None and b.phases.queue_s == 0.0
    assert b.phases.prefill_s == pytest.approx(delayed_s - 100.0 - (first_s - 100.0) / 2)
    [(_, phases)] = ends_and_phases(subject, clock).values()
    assert sum(phases) == pytest.approx(delayed_s - 100.0)


def test_the_seconds_of_waiting_and_of_service_are_totals() -> None:
    clock = Clock()
    subject = engine(clock, max_batch=1)
    for name, tokens in (("a", 2), ("b", 4), ("c", 6), ("d", 1)):
        subject.add(request(name, tokens))
    subject.step()
    clock.now_s = 102.0  # b began at 101
    assert subject.abort("b") and subject.abort("d")
    assert ends(subject, clock) == {"a": 2.0, "c": 5.0}
    done = subject.statistics()
    assert (done.queue_s, done.service_s) == (0.0 + 1.0 + 2.0 + 2.0, 1.0 + 1.0 + 3.0)


def test_an_aborted_turn_makes_room() -> None:
    clock = Clock()
    subject = engine(clock, max_batch=1)
    for name in "ab":
        subject.add(request(name, 2))
    subject.step()
    clock.now_s = 100.5
    assert subject.abort("a")
    assert ends(subject, clock) == {"b": 1.5}


def test_an_answer_nobody_fetched_yet_can_be_aborted() -> None:
    clock = Clock()
    subject = engine(clock)
    subject.add(request("a", 2))
    subject.step()
    clock.now_s = 200.0
    subject.add(request("b", 2))
    assert subject.abort("a") and not subject.abort("a")
    assert ends(subject, clock) == {"b": 101.0}


@pytest.mark.parametrize(
    ("at_s", "count"), [(0.0, 0), (1.0, 0), (1.4, 0), (1.5, 1), (2.9, 3), (3.0, 4), (3.49, 4)]
)
def test_an_interrupted_answer_has_the_tokens_of_its_time(at_s: float, count: int) -> None:
    clock = Clock()
    subject = engine(clock, prompt_share=1.0)  # two tokens of prompt: the answer begins after 1.0 s
    subject.add(request("a", 5, prompt=2))
    subject.step()
    clock.now_s = 100.0 + at_s
    result = subject.abort("a")
    assert result is not None and len(result.tokens) == len(result.logprobs) == count
    assert result.finish_reason == "interrupted" and subject.statistics().generated_tokens == count


@given(seed=st.integers(0, 10**6), at_s=st.floats(0.0, 20.0))
def test_an_interrupted_answer_goes_on_as_its_seed_says(seed: int, at_s: float) -> None:
    clock = Clock()
    subject = engine(clock, median_tokens=12.0, sigma=1.0)
    whole, reason = sample_answer(subject._config, seed, 64)
    subject.add(EngineRequest("a", (97,), seed, 1.0, 64))
    subject.step()
    clock.now_s += at_s
    part = subject.abort("a")
    assert part is not None and part.tokens == whole[: len(part.tokens)]
    assert (part.finish_reason == "interrupted") == (len(part.tokens) < len(whole))
    if part.finish_reason == "interrupted":
        drawn = len(part.tokens)
        subject.add(EngineRequest("a", (97, *part.tokens), seed, 1.0, 64 - drawn, drawn))
        begun_s = clock.now_s
        while not (results := subject.step()):
            clock.now_s = subject.due_s
        assert part.tokens + results[0].tokens == whole and results[0].finish_reason == reason
        assert clock.now_s - begun_s == pytest.approx((len(whole) - drawn) * 0.5)


@given(
    tokens=st.lists(st.integers(1, 20), min_size=1, max_size=12),
    looks=st.lists(st.floats(0.01, 30.0), max_size=20),
    max_batch=st.integers(1, 4),
    crowding=st.sampled_from([0.0, 0.3]),
)
def test_looking_changes_nothing(
    tokens: list[int], looks: list[float], max_batch: int, crowding: float
) -> None:
    found = []
    for moments in ([], sorted(looks)):
        clock = Clock()
        subject = engine(clock, max_batch=max_batch, crowding=crowding)
        for number, count in enumerate(tokens):
            subject.add(request(str(number), count))
        subject.step()
        seen: dict[str, float] = {}
        for moment in moments:
            while subject.due_s <= 100.0 + moment:
                clock.now_s = subject.due_s
                seen |= {result.request_id: clock.now_s - 100.0 for result in subject.step()}
            clock.now_s = 100.0 + moment
            seen |= {result.request_id: clock.now_s - 100.0 for result in subject.step()}
        found.append(seen | ends(subject, clock))
        assert subject.statistics().generated_tokens == sum(tokens)
    assert found[0] == pytest.approx(found[1])


def test_lengths_have_a_long_tail() -> None:
    config = SimulatedEngineConfig(median_tokens=32.0, sigma=1.0)
    lengths = [len(sample_answer(config, seed, 100_000)[0]) for seed in range(4000)]
    logs = [math.log(length / 32) for length in lengths]
    assert abs(statistics.fmean(logs)) < 0.05 and abs(statistics.stdev(logs) - 1) < 0.05


def test_the_seed_alone_decides() -> None:
    config = SimulatedEngineConfig(median_tokens=8.0)
    answers = [sample_answer(config, seed, 64) for seed in range(50)]
    assert answers == [sample_answer(config, seed, 64) for seed in range(50)]
    assert len(set(answers)) > 40  # the shortest answers are alike
    for tokens, reason in answers:
        assert (tokens[-1] == END_OF_SEQUENCE) == (reason == "stop") and END_OF_SEQUENCE not in tokens[:-1]


def test_a_longer_limit_changes_nothing_for_those_that_stop() -> None:
    config = SimulatedEngineConfig(median_tokens=8.0)
    for seed in range(50):
        tokens, reason = sample_answer(config, seed, 16)
        assert len(tokens) <= 16
        if reason == "stop":
            assert sample_answer(config, seed, 1000) == (tokens, reason)


# ---------------------------------------------------------------------- times of a device

ON_DEVICE = RooflineTimes(
    step_s=0.25,
    weights_s=1.0,
    token_s=0.125,
    context_token_s=0.0625,
    pair_s=0.0,
    chunk_tokens=64,
    kv_tokens=200,
)
APART = ON_DEVICE.model_copy(update={"prompts_apart": True, "chunk_s": 0.5})
"""Prompts have forwards of their own, which give the first tokens."""


def step_by_step(
    requests: list[tuple[int, int]], max_batch: int, times: RooflineTimes
) -> tuple[dict[str, float], dict[str, float]]:
    """The ends of requests, prompt and answer each, that come at the same time, and the times of their first tokens:
    every step is taken by itself."""
    waiting = [(str(n), prompt, tokens) for n, (prompt, tokens) in enumerate(requests)]
    running: dict[str, list[int]] = {}
    sizes = {name: prompt + tokens for name, prompt, tokens in waiting}
    now_s = 0.0
    end_s: dict[str, float] = {}
    first_s: dict[str, float] = {}
    while waiting or running:
        batch, prompts = len(running), []
        reserved = sum(sizes[name] for name in running)
        while waiting and len(running) < max_batch and reserved + sizes[waiting[0][0]] <= times.kv_tokens:
            name, prompt, tokens = waiting.pop(0)
            running[name] = [prompt, tokens]
            reserved += sizes[name]
            prompts.append(prompt)
        now_s += times.prefill_s(prompts, batch)
        if times.prompts_apart:
            for name in [*running][batch:]:
                running[name][1] -= 1
                first_s[name] = end_s[name] = now_s
            running = {name: sizes_left for name, sizes_left in running.items() if sizes_left[1]}
        if not running:
            continue
        now_s += times.decode_s(len(running), sum(context for context, _ in running.values()))
        running = {name: [context + 1, left - 1] for name, (context, left) in running.items()}
        first_s = dict.fromkeys(running, now_s) | first_s
        end_s |= dict.fromkeys(running, now_s)
        running = {name: sizes_left for name, sizes_left in running.items() if sizes_left[1]}
    return end_s, first_s


def on_device(clock: Clock, max_batch: int, times: RooflineTimes = ON_DEVICE) -> SimulatedStepEngine:
    return SimulatedStepEngine(FIXED.model_copy(update={"max_batch": max_batch, "times": times}), clock)


@given(
    requests=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 40)), min_size=1, max_size=12),
    max_batch=st.integers(1, 8),
    times=st.sampled_from([ON_DEVICE, APART]),
)
def test_series_of_steps_end_when_single_steps_would(
    requests: list[tuple[int, int]], max_batch: int, times: RooflineTimes
) -> None:
    clock = Clock()
    subject = on_device(clock, max_batch, times)
    for n, (prompt, tokens) in enumerate(requests):
        subject.add(request(str(n), tokens, prompt))
    end_s, first_s = step_by_step(requests, max_batch, times)
    ended = ends_and_phases(subject, clock)
    assert {name: end for name, (end, _) in ended.items()} == pytest.approx(end_s)
    # All came at the begin.
    assert {name: sum(phases) for name, (_, phases) in ended.items()} == pytest.approx(first_s)


@given(
    requests=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 40)), min_size=1, max_size=12),
    pauses=st.lists(st.floats(1.0, 20.0), min_size=1, max_size=8),
    times=st.sampled_from([ON_DEVICE, APART]),
)
def test_calls_in_between_change_no_end(
    requests: list[tuple[int, int]], pauses: list[float], times: RooflineTimes
) -> None:
    clock = Clock()
    subject = on_device(clock, 8, times)
    for n, (prompt, tokens) in enumerate(requests):
        subject.add(request(str(n), tokens, prompt))
    end_s: dict[str, float] = {}
    first_s: dict[str, float] = {}
    for n in range(10_000):
        if not subject.pending:
            break
        clock.now_s = min(clock.now_s + pauses[n % len(pauses)], max(clock.now_s, subject.due_s))
        for result in subject.step():
            end_s[result.request_id] = clock.now_s - 100.0
            first_s[result.request_id] = sum(result.phases or ())
    whole_s, until_first_s = step_by_step(requests, 8, times)
    assert end_s == pytest.approx(whole_s) and first_s == pytest.approx(until_first_s)


def test_prompts_with_forwards_of_their_own_wait_for_the_end_of_a_step_and_are_computed_together() -> None:
    clock = Clock()
    subject = on_device(clock, 8, APART)
    subject.add(request("a", 3, 8))
    assert subject.step() == []
    prompt_s = APART.prefill_s([8], 0)
    step_s = APART.decode_s(1, 8)
    for name, part in (("b", 0.25), ("c", 0.75)):
        clock.now_s = 100.0 + prompt_s + part * step_s
        subject.add(request(name, 1, 16))
        assert subject.step() == [] and subject.statistics().waiting == 1 + (name == "c")
    b_s = prompt_s + step_s + APART.prefill_s([16, 16], 1)
    assert ends(subject, clock) == pytest.approx({"b": b_s, "c": b_s, "a": b_s + APART.decode_s(1, 9)}), (
        "an answer of one token ends with its prompt"
    )
    assert (subject.statistics().prefill_chunks, subject.statistics().computed_tokens) == (2, 8 + 2 * 16)


def test_a_sequence_has_its_first_token_when_its_prompt_is_computed() -> None:
    for part, count in ((0.5, 0), (1.0, 1)):
        clock = Clock()
        subject = on_device(clock, 8, APART)
        subject.add(request("a", 3, 8))
        subject.step()
        clock.now_s = 100.0 + part * APART.prefill_s([8], 0)
        result = subject.abort("a")
        assert result is not None and len(result.tokens) == count


def test_the_part_of_the_prompts_that_is_computed_takes_time_and_all_of_them_take_room() -> None:
    clock = Clock()
    config = FIXED.model_copy(update={"max_batch": 8, "times": APART, "computed_share": 0.25})
    subject = SimulatedStepEngine(config, clock)
    subject.add(request("a", 1, 80))
    subject.step()
    assert subject.due_s == pytest.approx(100.0 + APART.prefill_s([20], 0))
    with pytest.raises(PromptTooLong, match="200"):
        subject.add(request("large", 1, 200))


def test_a_request_that_never_fits_the_memory_is_refused_with_its_size() -> None:
    subject = on_device(Clock(), 8)
    subject.add(request("fits", 100, 100))
    with pytest.raises(PromptTooLong, match="200"):
        subject.add(request("large", 101, 100))


def test_a_sequence_waits_until_its_keys_and_values_have_room() -> None:
    clock = Clock()
    subject = on_device(clock, 8)
    for name in ("first", "second"):
        subject.add(request(name, 60, 60))
    subject.step()
    assert (subject.statistics().running, subject.statistics().waiting) == (1, 1)
    assert clock.now_s < subject.due_s, "nothing is to be done before the first has ended"
    assert list(ends(subject, clock)) == ["first", "second"]


def test_an_interrupted_sequence_leaves_its_room_and_the_others_their_pace() -> None:
    clock = Clock()
    subject = on_device(clock, 8)
    subject.add(request("kept", 40, 20))
    subject.add(request("aborted", 40, 100))
    subject.step()
    clock.now_s += 100.0
    aborted = subject.abort("aborted")
    assert aborted is not None and 0 < len(aborted.tokens) < 40
    subject.add(request("later", 10, 130))
    assert subject.statistics().waiting + subject.statistics().running == 2
    assert set(ends(subject, clock)) == {"kept", "later"}
    assert subject.statistics().prefill_s > 0.0
