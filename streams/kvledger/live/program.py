"""The engine's side: a vLLM that answers JSON lines. Runs in the engine's own environment and imports nothing of ours.

``program.py SETTINGS.json`` where the settings are keyword arguments of ``LLM`` with ``kv_events_config`` as a mapping.
One line out when it serves (``ready``: release and KV-cache groups), then one line out per line in: ``request``
(tokens, salt, max_tokens) is answered with ``cached``, the engine's ``num_cached_tokens``, and ``out``, the generated
tokens; ``reset`` empties the prefix cache. It ends with its standard input. What vLLM prints goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, TextIO


def main() -> None:
    """Serve until standard input ends."""
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM and its libraries print to stdout
    settings = json.loads(Path(sys.argv[1]).read_text())

    import vllm  # type: ignore[import-not-found]  # only the engine's environment has it
    from vllm import LLM
    from vllm.config import KVEventsConfig  # type: ignore[import-not-found]  # the same

    settings["kv_events_config"] = KVEventsConfig(**settings["kv_events_config"])
    llm = LLM(**settings)
    say(lines, t="ready", vllm=vllm.__version__, **facts(llm))
    for line in sys.stdin:
        asked = json.loads(line)
        if asked["t"] == "reset":
            say(lines, t="reset", ok=bool(llm.reset_prefix_cache()))
        else:
            say(lines, t="answer", **answer(llm, asked))


def say(lines: TextIO, **fields: Any) -> None:
    """One line out."""
    lines.write(json.dumps(fields) + "\n")


def answer(llm: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """Run one request to its end."""
    from vllm import SamplingParams

    prompt: dict[str, Any] = {"prompt_token_ids": asked["tokens"]}
    if asked.get("salt"):
        prompt["cache_salt"] = asked["salt"]
    how = SamplingParams(temperature=0.0, max_tokens=asked["max_tokens"], ignore_eos=True, detokenize=False)
    (done,) = llm.generate([prompt], how, use_tqdm=False)
    return {"cached": done.num_cached_tokens, "out": list(done.outputs[0].token_ids)}


def facts(llm: Any) -> dict[str, Any]:
    """What an operator would have to know of this engine: its groups, and what rounds its hits."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    config = scheduler.kv_cache_config
    groups = [
        {
            "group_idx": number,
            "kind": kind(group.kv_cache_spec),
            "block_size": group.kv_cache_spec.block_size,
            "sliding_window": getattr(group.kv_cache_spec, "sliding_window", None),
            "attention_chunk_size": getattr(group.kv_cache_spec, "attention_chunk_size", None),
        }
        for number, group in enumerate(config.kv_cache_groups)
    ]
    return {"groups": groups, "num_blocks": config.num_blocks}


KINDS = {
    "FullAttentionSpec": "full_attention",
    "MLAAttentionSpec": "mla_attention",
    "SlidingWindowSpec": "sliding_window",
    "ChunkedLocalAttentionSpec": "chunked_local_attention",
    "MambaSpec": "mamba",
}
"""For releases that have no words of their own for it (before 0.22)."""


def kind(spec: Any) -> str | None:
    """The engine's word for a group's kind of attention."""
    try:
        from vllm.v1.kv_cache_interface import (  # type: ignore[import-not-found]  # the same
            get_kv_cache_spec_kind,
        )
    except ImportError:
        inner = next(iter(getattr(spec, "kv_cache_specs", {}).values()), spec)
        return KINDS.get(type(inner).__name__)
    return str(get_kv_cache_spec_kind(spec).value)


if __name__ == "__main__":
    main()
