"""The server of the live page."""

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final

from ....actors.errors import ConfigError, RecipeError
from ...gateway.gateway_config import address_of
from ...run_folder.run_directory import RunDirectory
from .changes import Changes
from .live_status import follow_status
from .recorded_run import RecordedRun

_KEY_BYTES: Final = 24


@asynccontextmanager
async def served_page(paths: Sequence[Path], listen: str, option: str = "--listen ") -> AsyncIterator[str]:
    """Serves the page of these runs while it is entered; the address, with its key. ``option``: the words before
    ``listen`` in errors. Raises RunDirectoryError for
    another folder, ConfigError for an address that can't be had, RecipeError without the extra."""
    try:
        from ....actors.gateway.http_server import serve  # an extra
        from .page_app import application
    except ImportError as error:
        raise RecipeError(f"the page needs the extra: pip install 'flexmarl[page]' ({error})") from None
    directories = [RunDirectory.recorded(path) for path in paths]
    key = secrets.token_urlsafe(_KEY_BYTES)
    listening = _listen(listen, option)
    host, port = listening.getsockname()[:2]
    async with AsyncExitStack() as stack:
        runs = [RecordedRun(directory.path) for directory in directories]
        for run in runs:  # in a thread: it waits for a request that reads trajectories
            stack.push_async_callback(asyncio.to_thread, run.close)
        await stack.enter_async_context(serve(application(runs, key, Changes(runs)), listening))
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        asking = [tasks.create_task(follow_status(run), name=f"status of {run.name}") for run in runs]
        yield f"http://{f'[{host}]' if ':' in host else host}:{port}/{key}/"
        for task in asking:
            task.cancel()


def _listen(address: str, option: str) -> socket.socket:
    try:
        host, port = address_of(address)
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except ValueError as error:
        raise ConfigError(f"{option}{error}") from None
    except OSError as error:
        raise ConfigError(
            f"{option}{address}: {error.strerror}; choose another port, or 0 for a free one"
        ) from None
