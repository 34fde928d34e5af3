"""The engine without weights: an endpoint with the OpenAI API generates. Text goes there, and text comes back.

    prompt of text      -> POST base_url/completions
    prompt of messages  -> POST base_url/chat/completions

The tokens of a turn are the bytes of its text, without log-probabilities: the endpoint's own tokens are unknown.
"""

import asyncio
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any, Final

import httpx2
import numpy as np

from ....transport.handle import StateHandle
from ....transport.state import StateTransport
from ...errors import EndpointFailed, EngineFailed, InvalidRequest
from ..inference_config import OpenaiEngineConfig
from .byte_codec import ByteCodec
from .engine import (
    TRANSFER_TIMEOUT_S,
    Engine,
    EngineRequest,
    EngineResult,
    EngineStatistics,
    LoadTimes,
    OnTokens,
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
        """See ``Engine``; ``on_tokens`` gets nothing, the text comes with the result alone. Raises EndpointFailed."""
        if self._closed.is_set():
            raise EngineFailed("it is closed")
        name = request.request_id
        if name in self._calls:
            raise InvalidRequest(name, "the id is in use")
        path, body = call_of(request, self._config, self._codec)
        call = self._calls[name] = asyncio.create_task(self._answer(name, path, body), name=f"turn {name}")
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

    async def _answer(self, name: str, path: str, body: dict[str, Any]) -> EngineResult:
        async with self._places:
            self._at_endpoint += 1
            try:
                return result_of(name, await self._post(path, body), self._config.base_url)
            finally:
                self._at_endpoint -= 1

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        """The body of the answer. Raises EndpointFailed after the last retry, or at once if the endpoint refuses the
        request itself."""
        url, attempts = self._config.base_url.rstrip("/") + path, self._config.retries + 1
        problem = ""
        for attempt in range(attempts):
            if attempt:
                await self._pause(min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** (attempt - 1)))
            try:
                response = await self._response(url, body)
            except httpx2.TransportError as error:
                problem = f"{type(error).__name__}: {error}"
                continue
            if response.is_success:
                return _json_of(response, url)
            problem = f"status {response.status_code}: {response.text[:_SHOWN]}"
            if response.status_code not in _RETRIED:
                raise EndpointFailed(url, problem)
        raise EndpointFailed(url, f"{attempts} attempts have failed, the last with {problem}")

    async def _response(self, url: str, body: dict[str, Any]) -> httpx2.Response:
        """Endpoints of newer models refuse ``max_tokens``, and name the key that they want: from then on it has that
        name, if it is a key of messages."""
        if not self._takes_max_tokens:
            body = _renamed(body)
        response = await self._client.post(url, json=body)
        refused = response.status_code == HTTPStatus.BAD_REQUEST and _NEW_NAME in response.text
        if refused and "messages" in body and "max_tokens" in body:
            self._takes_max_tokens = False
            response = await self._client.post(url, json=_renamed(body))
        return response

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

    async def build(self) -> Engine:
        return OpenaiEngine(self._config, self._codec)


def api_key(config: OpenaiEngineConfig) -> str | None:
    """The key in the config's file; None without one. Raises OSError."""
    return None if config.api_key_file is None else config.api_key_file.read_text().strip()


def call_of(
    request: EngineRequest, config: OpenaiEngineConfig, codec: ByteCodec
) -> tuple[str, dict[str, Any]]:
    """The path and the body for ``request``. Raises InvalidRequest for sampling that the API does not have."""
    cut, chat = request.truncation, request.chat
    body: dict[str, Any] = {
        "model": config.model,
        "temperature": request.temperature,
        "max_tokens": request.max_new_tokens,
        "seed": request.seed % 2**31,  # the range of every server
    }
    if cut is not None:
        for key in ("top_k", "min_p"):
            if getattr(cut, key):
                raise InvalidRequest(request.request_id, f"{key}: the engine openai has no such option")
        body["top_p"] = cut.top_p
    if request.stop:
        body["stop"] = [*request.stop]
    if chat is None:
        return "/completions", body | {"prompt": codec.decode(request.prompt_tokens)}
    if chat.tools:
        raise InvalidRequest(request.request_id, "tools: the engine openai takes messages without tools")
    return "/chat/completions", body | {"messages": [*chat.messages]}


def result_of(name: str, answer: Any, url: str) -> EngineResult:
    """The result in an answer of the endpoint. Raises EndpointFailed if there is no text in it."""
    try:
        choice = answer["choices"][0]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        reason = choice.get("finish_reason")
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise EndpointFailed(url, f"its answer has no text: {answer!s:.{_SHOWN}}") from error
    if not isinstance(text, str) or reason not in ("stop", "length"):
        raise EndpointFailed(url, f"its answer has no complete text: finish_reason is {reason!r}")
    return EngineResult(name, tuple(text.encode(errors="replace")), (), reason)


def _renamed(body: dict[str, Any]) -> dict[str, Any]:
    if "messages" not in body:
        return body
    return {_NEW_NAME if key == "max_tokens" else key: value for key, value in body.items()}


def _json_of(response: httpx2.Response, url: str) -> Any:
    try:
        return response.json()
    except ValueError as error:
        raise EndpointFailed(url, f"its answer is not JSON: {response.text[:_SHOWN]}") from error
