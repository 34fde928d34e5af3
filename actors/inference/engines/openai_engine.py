"""The engine without weights: an endpoint with the OpenAI API generates. Text goes there, and text comes back.

    prompt of text      -> POST base_url/completions
    prompt of messages  -> POST base_url/chat/completions

The tokens of a turn are the bytes of its text, without log-probabilities: the endpoint's own tokens are unknown. The
text is streamed if the workflow wants it in parts.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import replace
from http import HTTPStatus
from typing import Any, Final, Self

import httpx2
import numpy as np

from ....transport.handle import StateHandle
from ....transport.state import StateTransport
from ...chat.byte_codec import ByteCodec
from ...errors import EndpointFailed, EngineFailed, InvalidRequest
from ...messages import ModelConfig
from ..inference_config import OpenaiEngineConfig
from ..instance_setup import ServedBase
from .endpoint_messages import StreamedAnswer, call_of, result_of
from .engine import (
    TRANSFER_TIMEOUT_S,
    Engine,
    EngineRequest,
    EngineResult,
    EngineStatistics,
    LoadTimes,
    OnTokens,
    Phases,
)
from .engine_factory import EngineFactory

_FIRST_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 30.0
_SHOWN: Final = 200
_RETRIED: Final = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS, *range(500, 600)})

_NEW_NAME: Final = "max_completion_tokens"

Pause = Callable[[float], Awaitable[object]]


class OpenaiEngine(Engine):
    """Has at most ``max_batch`` requests at the endpoint at a time; the others wait here."""

    def __init__(self, config: OpenaiEngineConfig, codec: ByteCodec, pause: Pause = asyncio.sleep) -> None:
        """``pause``: waits so many seconds before a retry."""
        self._config, self._codec, self._pause = config, codec, pause
        headers = {"Authorization": f"Bearer {key}"} if (key := api_key(config)) else {}
        self._client = httpx2.AsyncClient(timeout=config.request_timeout_s, headers=headers)
        self._places = asyncio.Semaphore(config.max_batch)
        self._calls: dict[str, asyncio.Task[EngineResult]] = {}
        self._at_endpoint = self._prompt_tokens = self._generated = self._interrupted = 0
        self._takes_max_tokens = True
        self._closed = asyncio.Event()

    async def generate(self, request: EngineRequest, on_tokens: OnTokens | None = None) -> EngineResult:
        """See ``Engine``. If the endpoint fails on the way, ``on_tokens`` gets nothing more: the text comes with the
        result, as calls of tools do. Raises EndpointFailed."""
        if self._closed.is_set():
            raise EngineFailed("it is closed")
        name = request.request_id
        if name in self._calls:
            raise InvalidRequest(name, "the id is in use")
        path, body = call_of(request, self._config, self._codec)
        call = self._calls[name] = asyncio.create_task(
            self._answer(name, path, body, on_tokens), name=f"turn {name}"
        )
        try:
            await asyncio.wait([call])
        finally:
            call.cancel()
            del self._calls[name]
        if call.cancelled():
            if self._closed.is_set():
                raise EngineFailed("it was closed")
            self._interrupted += 1
            return EngineResult(name, (), (), "interrupted")
        result = call.result()
        self._prompt_tokens += len(request.prompt_tokens)
        self._generated += len(result.tokens)
        return result

    async def _answer(
        self, name: str, path: str, body: dict[str, Any], on_tokens: OnTokens | None
    ) -> EngineResult:
        loop = asyncio.get_running_loop()
        added, first_text = loop.time(), math.inf

        def note_first(tokens: tuple[int, ...]) -> object:
            nonlocal first_text
            first_text = min(first_text, loop.time())
            return on_tokens is not None and on_tokens(tokens)

        async with self._places:
            begun = loop.time()
            self._at_endpoint += 1
            try:
                answer = await self._post(path, body, None if on_tokens is None else note_first)
            finally:
                self._at_endpoint -= 1
        # Only an answer that comes piece by piece says when its first one was there.
        phases = None if first_text == math.inf else Phases(begun - added, first_text - begun)
        if answer is None:
            return EngineResult(name, (), (), "interrupted", phases)
        return replace(result_of(name, answer, self._config.base_url), phases=phases)

    async def _post(self, path: str, body: dict[str, Any], on_tokens: OnTokens | None) -> Any:
        """The body of the answer; None if ``on_tokens`` has ended it. Raises EndpointFailed after the last retry, or at
        once if the endpoint refuses the request itself."""
        url, attempts = self._config.base_url.rstrip("/") + path, self._config.retries + 1
        problem = ""
        for attempt in range(attempts):
            if attempt:
                await self._pause(min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** (attempt - 1)))
            try:
                response = await self._response(url, body, None if attempt else on_tokens)
            except httpx2.TransportError as error:
                problem = f"{type(error).__name__}: {error}"
                continue
            if not isinstance(response, httpx2.Response):
                return response
            if response.is_success:
                return _json_of(response, url)
            problem = f"status {response.status_code}: {response.text[:_SHOWN]}"
            if response.status_code not in _RETRIED:
                raise EndpointFailed(url, problem)
        raise EndpointFailed(url, f"{attempts} attempts have failed, the last with {problem}")

    async def _response(
        self, url: str, body: dict[str, Any], on_tokens: OnTokens | None
    ) -> httpx2.Response | dict[str, Any] | None:
        """Endpoints of newer models refuse ``max_tokens``, and name the key that they want: from then on it has that
        name, if it is a key of messages."""
        if not self._takes_max_tokens:
            body = _rename_token_limit(body)
        response = await self._send(url, body, on_tokens)
        if (
            isinstance(response, httpx2.Response)
            and response.status_code == HTTPStatus.BAD_REQUEST
            and _NEW_NAME in response.text
            and "messages" in body
            and "max_tokens" in body
        ):
            self._takes_max_tokens = False
            response = await self._send(url, _rename_token_limit(body), on_tokens)
        return response

    async def _send(
        self, url: str, body: dict[str, Any], on_tokens: OnTokens | None
    ) -> httpx2.Response | dict[str, Any] | None:
        """The response, or, of a stream, the whole answer; None if ``on_tokens`` has ended it."""
        if on_tokens is None:
            return await self._client.post(url, json=body)
        async with self._client.stream("POST", url, json=body | {"stream": True}) as response:
            streams = response.headers.get("content-type", "").startswith("text/event-stream")
            if not response.is_success or not streams:
                await response.aread()
                return response
            streamed = StreamedAnswer()
            async for line in response.aiter_lines():
                try:
                    text = streamed.take(line)
                except ValueError as error:
                    raise EndpointFailed(url, f"its stream is invalid: {error}") from error
                if text and on_tokens(tuple(text.encode(errors="replace"))):
                    return None
            return streamed.answer()

    async def interrupt(self, adapter: str | None = None) -> None:
        calls = [*self._calls.values()]
        for call in calls:
            call.cancel()
        if calls:
            await asyncio.wait(calls)

    async def load(self, handle: StateHandle, transport: StateTransport, adapter: str = "") -> LoadTimes:
        """Fetches the placeholder that is published in the place of weights."""
        await transport.get(handle, into={"state": np.zeros(2, np.int64)}, timeout_s=TRANSFER_TIMEOUT_S)
        return LoadTimes(0.0, 0.0)

    def statistics(self) -> EngineStatistics:
        return EngineStatistics(
            steps=0,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated,
            interrupted=self._interrupted,
            prefill_s=0.0,
            decode_s=0.0,
            batch_occupancy=0.0,
            running=self._at_endpoint,
            waiting=len(self._calls) - self._at_endpoint,
            cache_tokens=0,
        )

    async def wait_closed(self) -> None:
        await self._closed.wait()

    async def close(self) -> None:
        self._closed.set()
        await self.interrupt()
        await self._client.aclose()


class OpenaiFactory(EngineFactory):
    """Serves any endpoint: there is no model here."""

    def __init__(self, config: OpenaiEngineConfig) -> None:
        self.codec = self._codec = ByteCodec("bytes")
        self.architecture = config
        self._config = config

    @classmethod
    async def open(
        cls, model: ModelConfig | None, options: OpenaiEngineConfig, base: ServedBase | None
    ) -> Self:
        return cls(options)

    async def build(self) -> Engine:
        return OpenaiEngine(self._config, self._codec)


def api_key(config: OpenaiEngineConfig) -> str | None:
    """The key in the config's file; None without one. Raises OSError."""
    return None if config.api_key_file is None else config.api_key_file.read_text().strip()


def _rename_token_limit(body: dict[str, Any]) -> dict[str, Any]:
    if "messages" not in body:
        return body
    return {_NEW_NAME if key == "max_tokens" else key: value for key, value in body.items()}


def _json_of(response: httpx2.Response, url: str) -> Any:
    try:
        return response.json()
    except ValueError as error:
        raise EndpointFailed(url, f"its answer is not JSON: {response.text[:_SHOWN]}") from error
