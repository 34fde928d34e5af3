"""A policy's state without its tensors, between a backend and messages."""

from dataclasses import replace
from typing import Any

from pydantic import TypeAdapter

from flexmarl.actors.messages import BaseState, HostState, Moved, Suspended
from flexmarl.actors.trainer.backends.torch_policy.held_samples import HeldSample
from flexmarl.actors.trainer.backends.torch_policy.policy_position import PolicyPosition, read_position
from flexmarl.actors.trainer.pool.state_data import plain_data, sent_data
from flexmarl.core.protocol.codec import MAX_ENVELOPE_BYTES, MAX_ENVELOPE_ITEMS, Encoder, unpack
from flexmarl.transport.handle import StateHandle

from ..backends.torch_policy.policies import make_samples

HANDLE = StateHandle("policy", 0, 0, None, (), ())


def received(message: Any) -> tuple[Any, int]:
    """``message`` as an endpoint receives it, and the bytes of its envelope."""
    encoder = Encoder()
    packed = encoder.pack(message)
    plain = unpack(packed, [bytearray(view) for view in encoder.take_buffers()])
    return TypeAdapter(type(message)).validate_python(plain), len(packed)


def test_held_samples_of_more_tokens_than_an_envelope_has_values_are_suspended_and_resumed() -> None:
    count, length = 36, 2**16
    assert count * length > 2 * MAX_ENVELOPE_ITEMS
    sample = replace(
        make_samples(1)[0],
        tokens=tuple(range(length)),
        prompt_tokens=tuple(range(100_000, 100_100)),
        logprobs=tuple(-1 / number for number in range(1, length + 1)),
    )
    held = [HeldSample(replace(sample, sample_id=str(n)), bytes(4 * length)) for n in range(count)]
    position = PolicyPosition(version=4, held=held)
    plain = position.plain()
    assert len(plain["held"]) > MAX_ENVELOPE_BYTES
    suspended, size = received(Suspended(None, sent_data(plain), Moved(0, "none")))
    assert size < 1000
    state = HostState(BaseState(HANDLE, False, HANDLE, suspended.data), None, suspended.data)
    resumed, size = received(state)
    assert size < 2000
    assert plain_data(resumed.base.data)["held"] == plain["held"]
    assert read_position(plain_data(resumed.data)) == position


def test_other_values_of_a_position_stay_plain_data() -> None:
    position = PolicyPosition(version=4, accumulated=True)
    state, _ = received(Suspended(None, sent_data(position.plain()), Moved(0, "none")))
    assert state.data["version"] == 4 and state.data["accumulated"] is True
    assert read_position(plain_data(state.data)) == position
