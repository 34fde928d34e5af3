"""The bare patterns, for moments only."""

from collections.abc import Awaitable, Callable
from pathlib import Path

import msgpack
import numpy as np
import psutil
import pytest

from flexmarl.launch.bench.bare_zeromq import Bare, pack_call
from flexmarl.launch.bench.measure import ONE_WAY_BURST, gathered
from flexmarl.launch.errors import BenchmarkFailed
from flexmarl.launch.hosts import env


class Answers(list[object]):
    """The results of each ``call``."""

    def __init__(self, call: Callable[[], Awaitable[object]]) -> None:
        super().__init__()
        self._call = call

    async def call(self) -> None:
        self.append(await self._call())


@pytest.mark.parametrize("curve", [False, True], ids=["ipc", "tcp_curve"])
async def test_every_pattern_works(private: Path, curve: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    array = np.arange(2**20, dtype=np.uint8)
    this = psutil.Process()
    before = set(this.children())
    bare_patterns = Bare(
        private,
        ("latency", "calls", "joined", "array"),
        curve=curve,
        environment=env.actor_environment(),
        array_bytes=array.nbytes,
    )
    async with bare_patterns as bare:
        assert len(set(this.children()) - before) == 4
        latencies = await bare.latency(None, 0.02) + await bare.latency({"key": "value"}, 0.02)
        assert latencies and all(microseconds > 0 for microseconds in latencies)
        answers = Answers(bare._calls.call)
        monkeypatch.setattr(bare._calls, "call", answers.call)
        assert await bare.calls_per_s(0.05, 50) > 0
        assert set(answers) == {None} and not bare._calls._replies, "an empty call has an empty answer"

        joined = Answers(bare.joined.call)
        assert await gathered(joined.call, 0.05, 50) > 0
        assert set(joined) == {None} and len(joined) % 50 == 0

        assert await bare.one_way_per_s(0.05) > 0
        told = await bare.joined.told()
        assert told and told % ONE_WAY_BURST == 0
        for stamp in (0, 255):
            assert 0 < await bare.array_gb_s(array, stamp) < 1e3
    assert set(this.children()) <= before


async def test_a_peer_that_does_not_start_is_told(private: Path, capfd: pytest.CaptureFixture[str]) -> None:
    nowhere = private / "no-such-directory"
    with pytest.raises(BenchmarkFailed, match="the bare latency peer did not start"):
        async with Bare(nowhere, ("latency",), curve=False, environment=env.actor_environment()):
            raise AssertionError("it started")
    assert "No such file or directory" in capfd.readouterr().err


def test_a_bare_call_has_the_content_of_one_of_ours() -> None:
    assert msgpack.unpackb(pack_call(7, None)) == [0, 7, "echo", "empty", 30.0, [], {}]
    assert msgpack.unpackb(pack_call(8, {"a": "b"})) == [0, 8, "echo", "echo_dict", 30.0, [{"a": "b"}], {}]
