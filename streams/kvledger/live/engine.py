"""One vLLM of our own: a process in the engine's environment that answers one request at a time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import msgspec

from kvledger.errors import Unavailable
from kvledger.live.environment import environment
from kvledger.live.families import BLOCK_TOKENS, FAMILIES, MODEL_TOKENS_MAX, write_model
from kvledger.live.workload import Job
from kvledger.stack import Progress
from kvledger.stack.ports import HOST, free_ports
from kvledger.stack.process import tail

PROGRAM: Final = Path(__file__).with_name("program.py")
START_SECONDS_MAX: Final = 600.0
"""40 to 50 s on two cores with nothing else running; the first start of a release also compiles its Python files."""

ANSWER_SECONDS_MAX: Final = 120.0
STOP_SECONDS_MAX: Final = 20.0
LINE_BYTES_MAX: Final = 2**20
"""One line of the engine's program: an answer holds at most ``MODEL_TOKENS_MAX`` numbers."""


class Ready(msgspec.Struct, frozen=True):
    """What the engine says of itself once it serves."""

    vllm: str
    groups: list[dict[str, Any]]
    num_blocks: int


class Reply(msgspec.Struct, frozen=True):
    """The engine's answer: tokens that it found cached (``num_cached_tokens``), and those that it generated."""

    cached: int
    out: list[int]


class Engine:
    """A family served by one vLLM. ``start``, then one request after the other, then ``stop``; or as a context.

    ``data`` and ``replay`` are where its events are had. Raises Unavailable, with the end of its log, for all that goes
    wrong with it.
    """

    def __init__(self, python: Path, family: str, folder: Path, *, progress: Progress) -> None:
        self.family = family
        self.model = family
        self.topic = f"kv@live-{family}@{family}"
        self.data, self.replay = "", ""
        self.config: dict[str, Any] = {}
        self._python, self._folder, self._progress = python, folder, progress
        self._log = folder / "engine.log"
        self._child: asyncio.subprocess.Process | None = None
        self._serves = False

    async def start(self) -> Ready:
        """Start it and wait until it serves; about a minute."""
        self.config = write_model(self.family, self._folder / "model")
        data, replay = free_ports(2)
        # an address with '*' is bound by the engine, any other it would connect to
        settings = self._settings(f"tcp://*:{data}", f"tcp://{HOST}:{replay}")
        self.data, self.replay = f"tcp://{HOST}:{data}", f"tcp://{HOST}:{replay}"
        (self._folder / "settings.json").write_text(json.dumps(settings))
        self._progress(f"{self.family}: starting a vLLM, about a minute (its log: {self._log})")
        with self._log.open("ab") as log:
            self._child = await asyncio.create_subprocess_exec(
                str(self._python),
                str(PROGRAM),
                str(self._folder / "settings.json"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env={**environment(os.environ.items()), **SWITCHES},
                limit=LINE_BYTES_MAX,
                start_new_session=True,
            )
        ready = msgspec.convert(await self._read(START_SECONDS_MAX, "ready"), Ready)
        self._serves = True
        return ready

    async def ask(self, job: Job) -> Reply:
        """Run one request to its end."""
        fields = {"t": "request", "tokens": job.tokens, "salt": job.salt, "max_tokens": job.max_tokens}
        await self._write(fields)
        return msgspec.convert(await self._read(ANSWER_SECONDS_MAX, "answer"), Reply)

    async def reset(self) -> None:
        """Empty the prefix cache while nothing runs; the engine announces it with its next step only."""
        await self._write({"t": "reset"})
        done = await self._read(ANSWER_SECONDS_MAX, "reset")
        if not done.get("ok"):
            raise Unavailable(self._obituary("refused to reset its prefix cache"))

    async def stop(self) -> None:
        """End it: its standard input ends, and what is left after a while is killed; at once where it only loads."""
        child = self._child
        if child is None:
            return
        if self._serves and child.returncode is None and child.stdin is not None:
            child.stdin.close()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(child.wait(), STOP_SECONDS_MAX)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        await child.wait()
        self._child = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def _settings(self, data: str, replay: str) -> dict[str, Any]:
        """Keyword arguments of ``LLM``."""
        return {
            "model": str(self._folder / "model"),
            "skip_tokenizer_init": True,
            "load_format": "dummy",
            "dtype": "float32",
            "enforce_eager": True,
            "enable_prefix_caching": True,
            "block_size": BLOCK_TOKENS,
            "max_model_len": MODEL_TOKENS_MAX,
            "num_gpu_blocks_override": FAMILIES[self.family].pool_blocks,
            "disable_hybrid_kv_cache_manager": False,
            "seed": 0,
            "kv_events_config": {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": data,
                "replay_endpoint": replay,
                "topic": self.topic,
            },
        }

    async def _write(self, fields: dict[str, Any]) -> None:
        child = self._running()
        assert child.stdin is not None  # noqa: S101 - a pipe was asked for
        try:
            child.stdin.write(msgspec.json.encode(fields) + b"\n")
            await child.stdin.drain()
        except (BrokenPipeError, ConnectionResetError) as error:
            raise Unavailable(self._obituary("ended")) from error

    async def _read(self, seconds_max: float, kind: str) -> dict[str, Any]:
        child = self._running()
        assert child.stdout is not None  # noqa: S101 - a pipe was asked for
        try:
            line = await asyncio.wait_for(child.stdout.readline(), seconds_max)
        except TimeoutError as error:
            raise Unavailable(self._obituary(f"said nothing for {seconds_max:.0f} s")) from error
        if not line:
            raise Unavailable(self._obituary(f"ended with code {await child.wait()}"))
        said: dict[str, Any] = msgspec.json.decode(line)
        if said.get("t") != kind:
            raise Unavailable(self._obituary(f"said {said.get('t')!r} where {kind!r} was due"))
        return said

    def _running(self) -> asyncio.subprocess.Process:
        if self._child is None:
            msg = f"the {self.family} engine was not started"
            raise RuntimeError(msg)
        return self._child

    def _obituary(self, what: str) -> str:
        return f"the {self.family} engine {what}; the end of {self._log}:\n{tail(self._log, 30)}"


SWITCHES: Final = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process, whose scheduler can be asked for its groups
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    # one thread, on any core: a tiny model gains nothing from more, and threads that wait for each other on cores that
    # the pipeline uses too turn a tenth of a second into ten
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TOKENIZERS_PARALLELISM": "false",
}
"""What an engine of ours finds in its environment, beside what we have ourselves."""
