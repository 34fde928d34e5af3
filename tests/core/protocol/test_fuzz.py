"""The runtime survives all input: the sender gets an error, the others notice nothing, memory stays bounded."""

import asyncio
import importlib.util
import resource
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flexmarl.core.errors import ActorDead, RemoteError, RemoteProtocolError
from flexmarl.core.protocol import codec, messages
from flexmarl.core.protocol.envelopes import Kind

from ...patience import PATIENCE_S
from ..fuzz_target import Fuzzed, Refused, header, serve_at_once, valid_envelopes

ROOT = Path(__file__).parents[3]
FEW = settings(max_examples=75, suppress_health_check=list(HealthCheck))

junk = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.sampled_from(["target", "system", "echo", "wait", "count", "Refused", "number", "!dead", ""])
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@st.composite
def mutated_envelope(draw: st.DrawFn) -> list[Any]:
    """A valid envelope with fields replaced by what a peer might make up."""
    envelope = list(draw(st.sampled_from(valid_envelopes())))
    for _ in range(draw(st.integers(0, 2))):
        index = draw(st.integers(0, len(envelope)))
        envelope[index : index + draw(st.integers(0, 1))] = [draw(junk)]
    return envelope


@st.composite
def message(draw: st.DrawFn) -> bytes:
    body = messages.join([codec.Encoder().pack(e) for e in draw(st.lists(mutated_envelope(), max_size=5))])
    if draw(st.integers(0, 3)) == 0:
        content = bytearray(body)
        for _ in range(draw(st.integers(1, 3))):
            content[draw(st.integers(0, len(content) - 1))] = draw(st.integers(0, 255))
        return bytes(content)
    return body


def run_fuzzed(bodies: list[bytes], head: bytes) -> None:
    """Feeds the messages to a network, and asks it something as another peer."""
    asyncio.run(_run_fuzzed(bodies, head))


async def _run_fuzzed(bodies: list[bytes], head: bytes) -> None:
    unexpected: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: unexpected.append(context))
    fuzzed = Fuzzed()
    neighbour = fuzzed.wire.connect("a neighbour")
    try:
        for body in bodies:
            fuzzed.feed(head + body, [b"buffer"])
            await asyncio.sleep(0)
        served = fuzzed.mailboxes["target"].statistics().served
        ask = codec.Encoder().pack([Kind.CALL, 1, "target", "echo", 5.0, [[3], {}, 1]])
        neighbours = messages.pack_header("neighbour", 1)
        fuzzed.network.received(neighbour, messages.join([ask], neighbours), [])
        serve_at_once(neighbour)
        for _ in range(100):
            if fuzzed.mailboxes["target"].statistics().served > served:
                break
            await asyncio.sleep(0)
        else:
            raise AssertionError("another peer is not served any more")
    finally:
        await fuzzed.close()
    assert not unexpected, unexpected


@FEW
@given(st.lists(message(), min_size=1, max_size=4))
def test_mutated_messages_harm_nobody(bodies: list[bytes]) -> None:
    run_fuzzed(bodies, header())


@FEW
@given(st.binary(max_size=60), st.lists(st.binary(max_size=100), max_size=3))
def test_random_bytes_harm_nobody(head: bytes, bodies: list[bytes]) -> None:
    run_fuzzed(bodies, head)
    run_fuzzed(bodies, header())


@FEW
@given(st.lists(message(), min_size=1, max_size=3))
def test_a_peer_raises_nothing_but_protocol_errors(bodies: list[bytes]) -> None:
    async def main() -> None:
        fuzzed = Fuzzed()
        try:
            for body in bodies:
                try:
                    fuzzed.asked.received(header() + body, [b"buffer"])
                except RemoteProtocolError:
                    continue
        finally:
            await fuzzed.close()

    asyncio.run(main())


@FEW
@given(st.lists(st.text(max_size=5) | junk, min_size=4, max_size=4), st.dictionaries(st.text(), junk) | junk)
def test_an_error_with_any_fields_is_the_declared_one_a_remote_one_or_a_refused_message(
    words: list[Any], fields: Any
) -> None:
    async def main() -> None:
        fuzzed = Fuzzed()
        await asyncio.sleep(0)  # the call and the stream have been sent
        try:
            for request_id in (1, 3):
                error = [
                    Kind.ERROR,
                    request_id,
                    *words[:3],
                    words[3] if words[3] == "" else "Refused",
                    fields,
                ]
                fuzzed.feed(messages.join([codec.Encoder().pack(error)], header()))
            async with asyncio.timeout(PATIENCE_S):
                ends = await asyncio.gather(fuzzed.calls[0], fuzzed.calls[2], return_exceptions=True)
            assert all(
                isinstance(end, Refused | RemoteError | RemoteProtocolError | ActorDead) for end in ends
            )
        finally:
            await fuzzed.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    "envelopes",
    [
        [[Kind.DONE, 0, [1, 2**63] * 100_000]],
        [[Kind.DONE, 0, list(range(200_000))]],
        [[Kind.PONG, 2**40, []]] * 20_000,
        [[Kind.PING, 0]] * 10_000,
        [[Kind.CALL, 5000 * n, "nobody", "x", 1.0, [[], {}, 0]] for n in range(1, 10_000)],
        [[Kind.TELL, 3 * n, "nobody", "x", 1.0, [[], {}, 0]] for n in range(1, 10_000)],
        [[Kind.CALL, 2**20 * n, "nobody", "x", 1.0, [[], {}, 0] * 100] for n in range(1, 100)],
        [[Kind.TELL, n, "nobody", "x", 1.0, [[], {}, 0] * 100] for n in range(1, 100)],
        [[Kind.CALL, n, "target", "wait", 1.0, [[], {}, 0] * 100] for n in range(1, 100)],
        [[Kind.REPLY, 1, [None] * 100_000]],
        [[Kind.GRANT, 5, 2**62]] * 20_000,
        [[Kind.CANCEL, n] for n in range(20_000)],
        [[Kind.ITEM, 3, n, None] for n in range(20_000)],
    ],
    ids=lambda e: f"{e[0][0].name} x {len(e)}",
)
async def test_what_claims_much_costs_what_it_weighs(envelopes: list[list[Any]]) -> None:
    encoder = codec.Encoder()
    body = messages.join([encoder.pack(envelope) for envelope in envelopes])
    fuzzed = Fuzzed()
    await asyncio.sleep(0)
    tracemalloc.start()
    try:
        started = time.process_time()
        fuzzed.feed(header() + body)
        took_s = time.process_time() - started  # of the CPU: other processes must not count
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        await fuzzed.close()
    assert peak < 10_000_000 + 300 * len(body)
    assert took_s < 10.0, "the loop stood still"  # 1 s or less on an idle machine, under tracemalloc


async def test_the_peer_that_sent_rubbish_gets_an_error_and_the_others_keep_their_calls() -> None:
    fuzzed = Fuzzed()
    await asyncio.sleep(0)
    fuzzed.network.received(fuzzed.incoming, header() + b"rubbish", [])
    assert fuzzed.network.refused_messages == 1
    await asyncio.sleep(0)
    assert fuzzed.wire.sent_bytes > 0
    call, _, stream = fuzzed.calls
    assert not call.done() and not stream.done()
    await fuzzed.close()


@pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None, reason="atheris is not to be had for this Python"
)
def test_coverage_guided_fuzzing_finds_nothing_in_a_few_seconds(tmp_path: Path) -> None:
    script = ROOT / "scripts" / "fuzz_decoder.py"
    # The peak that libFuzzer limits begins with that of the process which starts it.
    own_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    limits = [
        "-max_total_time=4",
        "-max_len=1024",
        f"-rss_limit_mb={own_mb + 2048}",
        f"-timeout={PATIENCE_S:.0f}",
    ]
    command = [
        sys.executable,
        "-P",
        str(script),
        str(tmp_path / "corpus"),
        *limits,
        f"-artifact_prefix={tmp_path}/",
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert "Done " in ended.stderr
