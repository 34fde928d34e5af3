"""The memory of tensors that a computation takes."""

from collections.abc import Callable

from torch.autograd import profiler


def peak_bytes(compute: Callable[[], object]) -> int:
    """The most bytes of tensors that were allocated at a time, beyond those at the begin."""
    with profiler.profile(profile_memory=True, use_kineto=True) as profile:
        compute()
    assert profile.kineto_results is not None
    events = [event for event in profile.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak
