"""An actor that knows which process has imported its module."""

import os
import random
import tempfile

import numpy as np

from flexmarl.core.actor import Actor, endpoint

IMPORTED_BY = os.getpid()
tempfile.gettempdir()  # remembers the folder


class Warm(Actor):
    @endpoint
    async def imported_by(self) -> int:
        return IMPORTED_BY

    @endpoint
    async def pid(self) -> int:
        return os.getpid()

    @endpoint
    async def drawn(self) -> float:
        return random.random()

    @endpoint
    async def drawn_by_numpy(self) -> float:
        return float(np.random.rand())  # the state that all forks would share

    @endpoint
    async def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    @endpoint
    async def temporary_folder(self) -> str:
        return tempfile.gettempdir()
