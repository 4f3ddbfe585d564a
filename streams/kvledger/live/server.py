"""An OpenAI-compatible vLLM server, asked over HTTP one request at a time (``/v1/completions`` with token ids)."""

from __future__ import annotations

import http.client
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit

import msgspec

from kvledger.errors import BadInput, Unavailable

CONNECT_SECONDS_MAX: Final = 10.0
ANSWER_SECONDS_MAX: Final = 600.0
"""One request to its end; a busy engine lets it wait."""

ANSWER_BYTES_MAX: Final = 64 * 2**20
ERROR_CHARS_MAX: Final = 300
"""How much of a server's own words an error quotes; they may repeat what was asked."""

FLAG: Final = "--enable-prompt-tokens-details"
TOKENS_MAX_DEFAULT: Final = 2048
"""Longest prompt and answer where the server does not say what it takes."""


class Served(msgspec.Struct, frozen=True):
    """What the server says of itself; ``tokens_max`` is the longest prompt with its answer."""

    model: str
    tokens_max: int
    vllm: str | None


class Completion(msgspec.Struct, frozen=True):
    """One answer: prompt tokens that the engine found cached, and generated tokens where the server returns them."""

    cached: int
    out: tuple[int, ...]


class _Details(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Choice(msgspec.Struct, frozen=True):
    token_ids: tuple[int, ...] | None = None


class _Completions(msgspec.Struct, frozen=True):
    choices: tuple[_Choice, ...] = ()
    usage: _Usage | None = None


class _Card(msgspec.Struct, frozen=True):
    id: str
    max_model_len: int | None = None


class _Cards(msgspec.Struct, frozen=True):
    data: tuple[_Card, ...] = ()


class _Release(msgspec.Struct, frozen=True):
    version: str | None = None


class _Tokens(msgspec.Struct, frozen=True):
    tokens: tuple[int, ...]


class Server:
    """Requests to ``endpoint`` (``http://HOST:PORT``), one connection each. ``key`` is sent as a bearer token.

    Raises BadInput where the request or the address is wrong, Unavailable where the server is not there or lacks the
    flag that makes it report cached tokens.
    """

    def __init__(self, endpoint: str, *, key: str | None = None) -> None:
        self._address = _address(endpoint)
        self._key = key

    def describe(self, model: str | None) -> Served:
        """The model to ask for: ``model``, or the only one that is served. Two requests."""
        cards = self._call("GET", "/v1/models", None, _Cards).data
        names = [card.id for card in cards]
        if model is None and len(names) != 1:
            msg = f"the server serves {', '.join(names) or 'nothing'}; name one with --model"
            raise BadInput(msg)
        found = next((card for card in cards if card.id == (model or names[0])), None)
        if found is None:
            msg = f"the server does not serve {model!r}; it serves {', '.join(names)}"
            raise BadInput(msg)
        return Served(found.id, found.max_model_len or TOKENS_MAX_DEFAULT, self._release())

    def complete(self, model: str, tokens: tuple[int, ...], *, max_tokens: int, salt: str | None = None) -> Completion:
        """Run one prompt to its end. ``model`` is the model's or an adapter's name."""
        body: dict[str, Any] = {
            "model": model,
            "prompt": tokens,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        if salt is not None:
            body["cache_salt"] = salt
        done = self._call("POST", "/v1/completions", body, _Completions)
        if done.usage is not None and done.usage.prompt_tokens not in (0, len(tokens)):
            msg = (
                f"the server counted {done.usage.prompt_tokens} prompt tokens where {len(tokens)} were sent: "
                f"it changed the prompt, so nothing that is recorded of it would be true"
            )
            raise BadInput(msg)
        details = done.usage and done.usage.prompt_tokens_details
        if details is None or details.cached_tokens is None:
            msg = f"the server does not report cached tokens; start it with: vllm serve … {FLAG}"
            raise Unavailable(msg)
        out = done.choices[0].token_ids if done.choices else None
        return Completion(details.cached_tokens, out or ())

    def tokenize(self, model: str, text: str) -> tuple[int, ...]:
        """The token ids of a prompt in words, by the server's own tokenizer."""
        told: _Tokens = self._call("POST", "/tokenize", {"model": model, "prompt": text}, _Tokens)
        return told.tokens

    def reset(self) -> None:
        """Empty the prefix cache; a server offers that only with VLLM_SERVER_DEV_MODE=1."""
        self._call("POST", "/reset_prefix_cache", None, None)

    def _release(self) -> str | None:
        """The release, where the server tells it."""
        try:
            told: _Release = self._call("GET", "/version", None, _Release)
        except (BadInput, Unavailable):
            return None
        return told.version

    def _call(self, method: str, path: str, body: Any, kind: Any) -> Any:
        """One HTTP exchange; the answer as ``kind`` (None: it does not matter)."""
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        where = f"{method} {self._address.geturl()}{path}"
        try:
            status, raw = self._exchange(method, path, None if body is None else msgspec.json.encode(body), headers)
        except (OSError, http.client.HTTPException) as error:
            msg = f"{where}: {str(error) or type(error).__name__}; does the server run, and is that its address?"
            raise Unavailable(msg) from error
        if status != http.client.OK:
            words = raw.decode(errors="replace")[:ERROR_CHARS_MAX]
            failed: type[BadInput | Unavailable] = BadInput if 400 <= status < 500 else Unavailable
            msg = f"{where} was answered with {status}: {words}"
            raise failed(msg)
        if kind is None:
            return None
        try:
            return msgspec.json.decode(raw, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            msg = f"{where}: not the answer of a vLLM server ({error})"
            raise Unavailable(msg) from error

    def _exchange(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> tuple[int, bytes]:
        kind = http.client.HTTPSConnection if self._address.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._address.hostname or "", self._address.port, timeout=CONNECT_SECONDS_MAX)
        try:
            connection.connect()
            connection.sock.settimeout(ANSWER_SECONDS_MAX)
            connection.request(method, self._address.path + path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read(ANSWER_BYTES_MAX)
        finally:
            connection.close()


def _address(endpoint: str) -> SplitResult:
    try:
        address = urlsplit(endpoint.rstrip("/").removesuffix("/v1"))
        port = address.port
    except ValueError as error:
        msg = f"{endpoint!r} is no address: {error}"
        raise BadInput(msg) from error
    if address.scheme not in ("http", "https") or not address.hostname or port == 0:
        msg = f"{endpoint!r} is no address of a server; write http://HOST:PORT"
        raise BadInput(msg)
    return address
