"""A small OpenAI-compatible server with a prefix cache, and the engine's sockets beside it.

One full-attention group that never evicts: a prompt's blocks are stored when it is computed, a later prompt finds the
longest run of them. Hashes are made up; what matters is that events and answers come from one cache.
"""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

import msgspec

from kvledger_engine.standin import StandIn

MODEL = "tiny"
BLOCK = 16
TOKENS_MAX = 512


class Cache:
    """The cache of one engine and what it publishes of it."""

    def __init__(self, engine: StandIn, block: int = BLOCK) -> None:
        self._engine, self._block = engine, block
        self._held: set[int] = set()
        self._cleared = False

    def reset(self) -> None:
        """Empty it; the clear is published with the next step, as vLLM does."""
        self._held.clear()
        self._cleared = True

    def run(self, prompt: list[int], answer: list[int], salt: str | None) -> int:
        """Compute one request; returns the tokens of its prompt that were cached."""
        size = self._block
        tokens = prompt + answer[:-1]  # the last one is never computed
        hashes = [_hash(tokens[:end], salt) for end in range(size, len(tokens) + 1, size)]
        known = 0
        while known < len(hashes) and (known + 1) * size < len(prompt) and hashes[known] in self._held:
            known += 1
        events: list[dict[str, Any]] = []
        if self._cleared:
            events.append({"type": "AllBlocksCleared"})
            self._cleared = False
        fresh = hashes[known:]
        if fresh:
            extra = [(salt,) if salt and known + j == 0 else None for j in range(len(fresh))]
            events.append(
                {
                    "type": "BlockStored",
                    "block_hashes": fresh,
                    "parent_block_hash": hashes[known - 1] if known else None,
                    "token_ids": tokens[known * size : len(hashes) * size],
                    "block_size": size,
                    "lora_id": None,
                    "medium": "GPU",
                    "lora_name": None,
                    "extra_keys": extra if any(extra) else None,
                    "group_idx": 0,
                    "kv_cache_spec_kind": "full_attention",
                }
            )
            self._held.update(fresh)
        if events:
            self._engine.publish(msgspec.msgpack.encode([1.0, events, 0]), topic=b"kv@tiny")
        return known * size


def answer_of(count: int) -> list[int]:
    """What it generates."""
    return [(7 * i) % 50 + 3 for i in range(count)]


class FakeServer:
    """``url`` and ``engine`` are its two faces. What it leaves out or refuses is set by its attributes."""

    def __init__(self) -> None:
        self.engine = StandIn()
        self.cache = Cache(self.engine)
        self.reports_cached = True
        self.adds_tokens = 0
        self.resets = 0
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        handler = type("Bound", (_Handler,), {"fake": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01})
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def __enter__(self) -> Self:
        self.engine.start()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()
        self.engine.stop()

    def complete(self, asked: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(asked)
        answer = answer_of(asked["max_tokens"])
        cached = self.cache.run(asked["prompt"], answer, asked.get("cache_salt"))
        usage: dict[str, Any] = {"prompt_tokens": len(asked["prompt"]) + self.adds_tokens}
        if self.reports_cached:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        return {"choices": [{"text": "", "token_ids": answer}], "usage": usage}

    def reset(self) -> None:
        self.resets += 1
        self.cache.reset()


class _Handler(BaseHTTPRequestHandler):
    fake: FakeServer

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._say({"data": [{"id": MODEL, "max_model_len": TOKENS_MAX}]})
        elif self.path == "/version":
            self._say({"version": "0.32.0"})
        else:
            self._say({"error": "no such path"}, 404)

    def do_POST(self) -> None:
        self.fake.headers.append(dict(self.headers))
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        asked = json.loads(body) if body else {}
        if self.path == "/v1/completions":
            self._say(self.fake.complete(asked))
        elif self.path == "/tokenize":
            self._say({"tokens": [len(word) for word in asked["prompt"].split()]})
        elif self.path == "/reset_prefix_cache":
            self.fake.reset()
            self._say({})
        else:
            self._say({"error": "no such path"}, 404)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the library's name
        """Nothing on stderr."""

    def _say(self, answer: dict[str, Any], status: int = 200) -> None:
        raw = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)


def _hash(tokens: list[int], salt: str | None) -> int:
    return int.from_bytes(hashlib.sha256(f"{salt} {tokens}".encode()).digest()[:8], "big")
