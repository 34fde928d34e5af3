"""A test of the battery for its tests: it does the thing that its row is named after."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

from scripts.gpu.checks import Card, Check, LeftOut, at_least, at_most


def run(card: Card) -> Iterator[Check]:
    match card.folder.name:
        case "PASSES":
            yield at_most("share", 0.123456, 0.5)
            yield Check("bytes", 2_000_000_000, "bytes")
        case "SLOW":
            yield Check("factor", card.limit_factor)
        case "FAILS":
            yield at_least("rate", 1.0, 2.0, "GB/s")
            yield at_most("later", 1.0, 2.0)
        case "RAISES":
            yield Check("before", True)
            raise RuntimeError("some reason")
        case "DIES":
            os.kill(os.getpid(), signal.SIGKILL)
        case "LEFT":
            raise LeftOut("it needs two cards")
        case "HANGS":
            # As an actor: in a session of its own, and its parent has died.
            program = "import os; os.setsid(); print(os.getpid(), flush=True); os.execvp('sleep', ['sleep', '1000'])"
            started = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
            assert started.stdout is not None
            yield Check("child", int(started.stdout.readline()))
            time.sleep(1000)
