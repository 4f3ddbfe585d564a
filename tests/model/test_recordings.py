"""Recorded engines through the pure parts, in one process: every prediction beside the engine's own answer."""

from __future__ import annotations

from pathlib import Path

import pytest
from inprocess import InProcess

from kvledger.verify.check import looking_ahead
from kvledger.verify.report import Comparison, Report
from kvledger_engine.recording import Meta, Probe, Published, Request, Reset, read

FIXTURES = Path(__file__).parents[1] / "fixtures"

EXACT = [
    "engine-traces/llama_s11",
    "engine-traces/gemma3_s11",
    "engine-traces/gemma3_vllm0.20.2_s51",
    "engine-traces/gemma3_vllm0.17.1_s60",
    "manager-traces/a_full",
    "manager-traces/b_full_swa",
    "manager-traces/b2_full_swa_swa_same",
    "manager-traces/c_full_2swa",
    "manager-traces/c4_full32_swa16",
    "manager-traces/d_full_mamba",
    "manager-traces/e_full_eagle",
    "manager-traces/f_full_chunked",
    "engine-traces/lfm2_s11",
]


async def compare(path: Path, *, engine_hashes: bool = True) -> Report:
    """The report of one recording; ``engine_hashes`` False asks by block keys alone."""
    report = Report(file=str(path), model="", engine=None)
    chain: InProcess | None = None
    after_reset = False
    for step in looking_ahead(read(path)):
        match step:
            case Meta():
                chain = InProcess(step, engine_hashes=engine_hashes)
                await chain.start()
            case Published():
                assert chain is not None
                await chain.publish(step.seq, step.payload)
            case Reset():
                after_reset = True
            case Request(cached=actual) | Probe(hit=actual):
                assert chain is not None
                holder = await chain.predict(step.tokens, lora=step.lora, salt=step.salt, mm=step.mm)
                report.add(
                    Comparison(
                        number=report.predictions + 1,
                        predicted=holder.hit_tokens,
                        actual=actual,
                        status=holder.status,
                        as_of=-1 if holder.as_of is None else holder.as_of,
                        after_reset=after_reset,
                    )
                )
                after_reset = False
            case _:
                pass
    return report


@pytest.mark.parametrize("name", EXACT)
async def test_every_prediction_equals_the_engines_answer(name: str) -> None:
    """All but the one right after an idle reset, which no event announces; and each is called exact."""
    report = await compare(FIXTURES / f"{name}.jsonl.gz")

    assert report.answered == report.exact
    assert report.predictions == report.called_exact
    assert report.predictions >= 38


@pytest.mark.parametrize(
    ("name", "under"), [("engine-traces/mistral_s11", 0), ("manager-traces/d2_full_mamba_partial", 1)]
)
async def test_a_prediction_from_tokens_alone_is_never_over(name: str, under: int) -> None:
    """Hidden salts of masked spans, pieces of blocks whose tokens were never published: short at most, and says so."""
    report = await compare(FIXTURES / f"{name}.jsonl.gz", engine_hashes=False)

    assert report.over == 0
    assert report.called_exact_wrongly == 0
    assert report.under <= under
