"""Coverage-guided fuzzing of all code that bytes from a socket reach: see scripts/fuzz.

The first byte of an input chooses its kind; the rest is one header, body or whole message.
"""

import asyncio
import sys
from pathlib import Path
from typing import NoReturn

import atheris
import structlog

root = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(root / "scripts" / "src"), str(root)]

with atheris.instrument_imports(include=["flexmarl.core", "tests.core.fuzz_target"]):
    from tests.core import fuzz_target

    from flexmarl.core.errors import RemoteProtocolError
    from flexmarl.core.protocol import codec, messages

# A network is replaced by a new one after this many messages.
MESSAGES_PER_NETWORK = 50


class Harness:
    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)
        self._loop.set_exception_handler(self._failed)
        self._target: fuzz_target.Fuzzed | None = None
        self._messages = 0
        self._failures: list[BaseException] = []

    def _failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        error = context.get("exception")
        if isinstance(error, Exception) and not type(error).__module__.startswith("flexmarl."):
            self._failures.append(error)  # not flexmarl's own: those are results of calls

    def __call__(self, data: bytes) -> None:
        if not data:
            return
        rest = data[1:]
        try:
            match data[0] % 4:
                case 0:
                    messages.unpack_header(rest)
                case 1:
                    messages.unpack_envelopes(rest, (b"first", b"second"))
                case 2:
                    messages.unpack_envelopes(rest)
                case 3:
                    self._loop.run_until_complete(self._feed(rest))
        except RemoteProtocolError:
            return
        if self._failures:
            raise self._failures.pop()

    async def _feed(self, data: bytes) -> None:
        if self._target is None or self._messages >= MESSAGES_PER_NETWORK:
            if self._target is not None:
                await self._target.close()
            self._target, self._messages = fuzz_target.Fuzzed(), 0
        self._messages += 1
        self._target.feed(data[1:] if data[:1] == b"\x00" else fuzz_target.header() + data)
        for _ in range(3):
            await asyncio.sleep(0)  # runs the tasks that the message has started


def seeds(corpus: Path) -> None:
    """Writes valid messages into ``corpus``, from which the fuzzing starts."""
    packed = [codec.Encoder().pack(envelope) for envelope in fuzz_target.valid_envelopes()]
    inputs = [b"\x00" + fuzz_target.header()]
    for first in (1, 2, 3):
        inputs += [bytes((first,)) + messages.join([envelope]) for envelope in packed]
        inputs.append(bytes((first,)) + messages.join(packed))
    for number, content in enumerate(inputs):
        (corpus / f"seed-{number}").write_bytes(content)


def _drop(logger: object, method: str, event: object) -> NoReturn:
    raise structlog.DropEvent


def main() -> None:
    structlog.configure(processors=[_drop])
    corpus = Path(sys.argv[1])
    corpus.mkdir(parents=True, exist_ok=True)
    seeds(corpus)
    atheris.Setup(sys.argv, Harness())
    atheris.Fuzz()


if __name__ == "__main__":
    main()
