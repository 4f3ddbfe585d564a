"""Predictions against answers: counts per recording, as a table for people and as JSON for machines."""

from __future__ import annotations

from collections import Counter

import msgspec


class Comparison(msgspec.Struct, frozen=True):
    """One prediction beside the engine's own answer (None: the recording has none).

    ``after_reset``: the one request right after an idle reset, which no event announces (data: the engine publishes its
    clear with the next step). ``blind`` is what a group-blind index would have said, where asked for.
    """

    number: int
    predicted: int
    actual: int | None
    status: str
    as_of: int
    after_reset: bool = False
    blind: int | None = None


class Report(msgspec.Struct):
    """One recording's totals."""

    file: str
    model: str
    engine: str | None
    predictions: int = 0
    answered: int = 0
    exact: int = 0
    over: int = 0
    under: int = 0
    called_exact: int = 0
    called_exact_wrongly: int = 0
    after_reset: int = 0
    after_reset_differ: int = 0
    blind_exact: int | None = None
    by_status: dict[str, int] = {}
    unplaced: int = 0
    batches: int = 0
    undecodable: int = 0
    seconds: float = 0.0
    error: str | None = None
    differences: list[Comparison] = []

    def add(self, one: Comparison) -> None:
        """Count one comparison. Those right after an idle reset are counted apart, and nowhere else."""
        if one.after_reset:
            self.after_reset += 1
            self.after_reset_differ += one.actual is not None and one.predicted != one.actual
            return
        self.predictions += 1
        self.by_status = dict(Counter(self.by_status) + Counter({one.status: 1}))
        self.called_exact += one.status == "exact"
        if one.actual is None:
            return
        self.answered += 1
        self.exact += one.predicted == one.actual
        self.over += one.predicted > one.actual
        self.under += one.predicted < one.actual
        self.called_exact_wrongly += one.status == "exact" and one.predicted != one.actual
        if one.blind is not None:
            self.blind_exact = (self.blind_exact or 0) + (one.blind == one.actual)
        if one.predicted != one.actual or one.status != "exact":
            self.differences.append(one)

    @property
    def agrees(self) -> bool:
        """Whether every answer that the recording holds was predicted, and none was wrongly called exact."""
        return self.error is None and self.exact == self.answered and self.called_exact_wrongly == 0

    @property
    def honest(self) -> bool:
        """Whether nothing that was called exact was wrong."""
        return self.error is None and self.called_exact_wrongly == 0


def table(reports: list[Report], *, differences_max: int = 5) -> str:
    """The reports as aligned text, the first few differences under each line that has any."""
    blind = any(report.blind_exact is not None for report in reports)
    head = ["recording", "engine", "predictions", "exact", "over", "under", "called exact", "wrongly", "unplaced", "s"]
    if blind:
        head.insert(6, "group-blind")
    rows = [head]
    for report in reports:
        row = [
            report.file.rsplit("/", 1)[-1],
            report.engine or "-",
            str(report.predictions),
            str(report.exact),
            str(report.over),
            str(report.under),
            str(report.called_exact),
            str(report.called_exact_wrongly),
            str(report.unplaced),
            f"{report.seconds:.1f}",
        ]
        if blind:
            row.insert(6, "-" if report.blind_exact is None else _share(report.blind_exact, report.answered))
        rows.append(row)
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = []
    for row, about in zip(rows, [None, *reports], strict=True):
        lines.append(
            "  ".join(w.ljust(n) if i < 2 else w.rjust(n) for i, (w, n) in enumerate(zip(row, widths, strict=True)))
        )
        if about is not None:
            lines += _details(about, differences_max)
    return "\n".join(lines)


def _details(report: Report, differences_max: int) -> list[str]:
    lines = []
    if report.error:
        lines.append(f"    error: {report.error}")
    if report.after_reset:
        differ = f", {report.after_reset_differ} of them answered before the engine's clear was published"
        lines.append(
            f"    right after an idle reset: {report.after_reset}{differ if report.after_reset_differ else ''}"
        )
    lines += [
        f"    prediction {one.number}: {one.predicted} ({one.status}), engine {one.actual}, as of batch {one.as_of}"
        for one in report.differences[:differences_max]
    ]
    if len(report.differences) > differences_max:
        lines.append(f"    … and {len(report.differences) - differences_max} more (--json lists them)")
    return lines


def _share(part: int, whole: int) -> str:
    return f"{part} ({part / whole:.0%})" if whole else str(part)
