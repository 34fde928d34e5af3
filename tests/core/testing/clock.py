"""The clock of the running loop."""

import asyncio


def now_s() -> float:
    return asyncio.get_running_loop().time()
