"""The results of a run: one row a case and direction, and their table and JSON."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path

from bench import machine
from bench.cases import BOTH, FORWARD
from bench.check import worst
from bench.measure import NO_TIME, Timing
from bench.peers import OURS, PLAIN, WITHOUT

SCHEMA = 1  # of the JSON; raised when a field changes its meaning
GREEN, RED, BOLD, RESET = "\033[32m", "\033[31m", "\033[1m", "\033[0m"


@dataclass
class Row:
    """One case in one direction. Timings and memory are by implementation, ours among them."""

    case: str
    about: str
    shape: str
    direction: str
    backend: str
    work: float  # of one call, in `unit`
    unit: str
    kept: float  # share of the pairs (i, j) that the mask keeps
    needs: dict[str, float] = field(default_factory=dict)  # see limits.needs
    bound_ms: float | None = None  # see limits.bound_ms
    error_ratios: dict[str, float] = field(default_factory=dict)  # by result; at most 1 is right
    peer_errors: dict[str, float] = field(default_factory=dict)  # of other packages
    failure: str | None = None  # why ours could not run
    timings: dict[str, Timing] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)  # peak extra bytes
    skipped: dict[str, str] = field(default_factory=dict)  # peer -> why it has no number

    @property
    def error_ratio(self) -> float:
        """The worst of the results; infinite if one is NaN or ours could not run."""
        return worst(self.error_ratios)

    @property
    def wrong(self) -> bool:
        """If true, no other number of the row is shown."""
        return self.failure is not None or not self.error_ratio <= 1

    @property
    def best_peer(self) -> str | None:
        """The fastest other implementation."""
        ours = (OURS, WITHOUT)
        peers = {name: t.median for name, t in self.timings.items() if name not in ours}
        return min(peers, key=peers.__getitem__) if peers and OURS in self.timings else None

    @property
    def speedup(self) -> float | None:
        """Best peer's median time over ours."""
        if self.wrong or self.best_peer is None:
            return None
        return self.timings[self.best_peer].median / self.timings[OURS].median

    @property
    def median_ms(self) -> float:
        """Our time."""
        return self.timings[OURS].median

    @property
    def of_bound(self) -> float | None:
        """The least possible time over ours."""
        if self.wrong or self.bound_ms is None or OURS not in self.timings:
            return None
        return self.bound_ms / self.median_ms

    @property
    def rate(self) -> float:
        """Work a second, in 1e9."""
        return self.work / self.median_ms / 1e6

    def as_json(self) -> dict:
        """Everything measured; only the errors if the result is wrong."""
        names = "case about shape direction backend work unit kept needs".split()
        entry = {n: getattr(self, n) for n in names}
        entry |= {"wrong": self.wrong, "failure": self.failure, "skipped": self.skipped}
        entry["error_ratios"] = {n: _finite(r) for n, r in self.error_ratios.items()}
        entry["peer_errors"] = {n: _finite(r) for n, r in self.peer_errors.items()}
        if self.wrong:
            return entry
        entry["times_ms"] = {name: timing_json(t) for name, t in self.timings.items()}
        entry["peak_extra_bytes"] = self.memory
        entry |= {"bound_ms": _rounded(self.bound_ms), "of_bound": _rounded(self.of_bound)}
        return entry | {"best_peer": self.best_peer, "speedup": _rounded(self.speedup)}


def timing_json(t: Timing) -> dict:
    """Median, quartiles and every sample, ms."""
    first, third = (_rounded(x) for x in t.quartiles)
    samples = [_rounded(x) for x in t.samples]
    return {"median": _rounded(t.median), "q25": first, "q75": third, "samples": samples}


def _rounded(x: float | None) -> float | None:
    return None if x is None else float(f"{x:.4g}")


def _finite(x: float) -> float | str:
    """JSON has no infinity, which becomes a string."""
    return _rounded(x) if math.isfinite(x) else str(x)


def write_json(entries: list, path: Path, **about: dict) -> None:
    """Rows or curves, one line each: a change of one case changes one line."""
    lines = ",\n".join("  " + json.dumps(entry.as_json(), allow_nan=False) for entry in entries)
    head = json.dumps({"schema": SCHEMA, **about}, indent=1)
    path.write_text(head[:-2] + f',\n "rows": [\n{lines}\n ]\n}}\n')


# ---- the table ----

HEAD = (
    "case", "", "ours, ms", "best peer, ms", "", "ratio", "rate", "of bound", "extra MiB", "error"
)  # fmt: skip
ALIGN = "<<>><<>>><"
UNITS = {"FLOP": "GFLOP/s", "score elements": "Gel/s"}
SHORT = {FORWARD: "fwd", BOTH: "fwd+bwd"}


def table(rows: list[Row], colour: bool = False) -> str:
    """The rows as aligned text."""
    lines = [HEAD, *(_cells(row) for row in rows)]
    widths = [max(len(line[n]) for line in lines) for n in range(len(HEAD))]
    padded = [
        [f"{cell:{a}{w}}" for cell, a, w in zip(line, ALIGN, widths, strict=True)] for line in lines
    ]
    text = ["  ".join(padded[0]).rstrip(), "-" * (sum(widths) + 2 * len(widths) - 2)]
    for n, (row, cells) in enumerate(zip(rows, padded[1:], strict=True)):
        if colour:
            _paint(row, cells)
        if n and rows[n - 1].case != row.case:
            text.append("")
        text.append("  ".join(cells).rstrip())
    return "\n".join(text)


def _cells(row: Row) -> tuple[str, ...]:
    start, error = (row.case, SHORT[row.direction]), f"{row.error_ratio:.2f}"
    if row.wrong:
        return (*start, "WRONG", "", "", "", "", "", "", error)
    ours = row.timings[OURS]
    rate = (f"{row.rate:.3g} {UNITS[row.unit]}", _share(row))
    if row.best_peer is None:
        none = "none ran" if row.skipped else "not timed"
        return (*start, _time(ours), none, "", "", *rate, _memory(row, OURS), error)
    peer, memory = row.timings[row.best_peer], [_memory(row, n) for n in (OURS, row.best_peer)]
    ratio = ratio_of(row.speedup, row.skipped) + (" SLOWER" if row.speedup < 1 else "")
    times = _time(ours), _time(peer), row.best_peer
    return (*start, *times, ratio, *rate, " / ".join(memory), error)


def ratio_of(speedup: float, skipped: dict[str, str]) -> str:
    """A row's ratio; at most that where a peer that may be faster had no time."""
    late = any(why == NO_TIME and "(memory)" not in peer for peer, why in skipped.items())
    return f"{'≤' if late else ''}{speedup:.2f}x"


def _time(t: Timing) -> str:
    return f"{t.median:.4g} ±{min(t.spread, 9.99):3.0%}"


def _share(row: Row) -> str:
    return "-" if row.of_bound is None else f"{row.of_bound:.0%}"


def _memory(row: Row, name: str) -> str:
    return f"{row.memory[name] / 2**20:.1f}" if name in row.memory else "?"


def _paint(row: Row, cells: list[str]) -> None:
    if row.wrong:
        cells[2] = f"{BOLD}{RED}{cells[2]}{RESET}"
    elif row.speedup is not None:
        cells[5] = f"{GREEN if row.speedup >= 1 else RED}{cells[5]}{RESET}"


def wants_colour(stream) -> bool:
    """True for a terminal, unless NO_COLOR is set (https://no-color.org)."""
    return stream.isatty() and "NO_COLOR" not in os.environ


# ---- the text around the table ----


def header(rows: list[Row], about: dict) -> str:
    """What ran where."""
    m, backends = about, sorted({row.backend for row in rows})
    commit = f"{(m['commit'] or 'no commit')[:9]}{', modified' if m['modified'] else ''}"
    lines = [
        f"fastattn {m['fastattn']} ({commit}) beside torch {m['torch']}, python {m['python']}",
        f"{m['device_name']}, {m['threads']} threads of {m['cores']} cores, {machine.isa(about)}; "
        f"our backend: {', '.join(backends)}",
    ]
    if m["extension"] != "loaded":
        lines.append(f"NO COMPILED KERNELS: {m['extension']}")
    if m["load_average"] > 0.5 * m["cores"]:
        lines.append(f"load average {m['load_average']} before the run: the times are noisy")
    return "\n".join(lines)


def _beside(row: Row, peer: str) -> str:
    """The time of the usual implementation, whichever peer is best."""
    ours, theirs = row.timings[OURS].median, row.timings[peer].median
    text = f"{peer} takes {theirs:.4g} ms, {theirs / ours:.3g} times ours"
    if OURS in row.memory:
        share = row.memory[OURS] / max(row.memory[peer], 1)
        text += f", and {_memory(row, peer)} MiB, of which ours is {share:.1%}"
    return text


COLUMNS = """\
fwd: inference without autograd; fwd+bwd: outputs and all gradients.
ms: median, ± half the interquartile range. ratio: best peer's time over ours, ≤ where there was no
    time to compile others.
rate: counts the pairs (query, key) that the mask keeps; a backward is 2.5 forwards, of a module's
    projections 2. Gel: 1e9 score elements (query, key, dim) of a forward, in either direction.
of bound: what the call must take on this machine over what it takes: products, exponentials and
    elements at the rates below, or inputs and results at that of reading as much.
extra MiB: peak growth of memory in one call, results included, ours / best peer.
error: largest error over the budget of fastattn.testing; at most 1 is right."""


def legend(rows: list[Row]) -> str:
    """What the columns mean, what the cases are, and warnings."""
    first = {row.case: row for row in reversed(rows)}
    about = [
        f"{row.case:<16}{row.shape}, {row.kept:.0%} kept: {row.about}"
        for row in sorted(first.values(), key=rows.index)
    ]
    parts = [[COLUMNS], about, _notes(rows), _warnings(rows)]
    return "\n\n".join("\n".join(part) for part in parts if part)


def _notes(rows: list[Row]) -> list[str]:
    lines, missing = [], {}
    for row in rows:
        name = f"{row.case} {SHORT[row.direction]}"
        lines += [f"{name}: {_beside(row, peer)}" for peer in PLAIN if peer in row.memory]
        lines += [f"{name}: {row.failure}"] if row.failure else []
        if WITHOUT in row.timings:
            share = row.timings[WITHOUT].median / row.median_ms
            lines.append(f"{name}: the same call without it takes {share:.0%} of the time")
        lines += [_others(row, name)] if row.peer_errors else []
        for peer, why in row.skipped.items():
            missing.setdefault(f"not measured, {peer}: {why}", []).append(name)
    return lines + [f"{what}: {', '.join(names)}" for what, names in missing.items()]


def _others(row: Row, name: str) -> str:
    """Every other package's time over ours, and its error: not the best one's alone."""
    ours = row.median_ms
    found = [
        f"{n} {row.timings[n].median / ours:.2f}x (error {error:.2f})"
        for n, error in row.peer_errors.items() if n in row.timings
    ]  # fmt: skip
    return f"{name}: {', '.join(found)}"


def _warnings(rows: list[Row]) -> list[str]:
    def listed(what: str, chosen: list[Row]) -> list[str]:
        names = ", ".join(f"{row.case} {SHORT[row.direction]}" for row in chosen)
        return [f"{what}: {names}"] if chosen else []

    slower = [row for row in rows if row.speedup is not None and row.speedup < 1]
    wrong = listed("WRONG, not reported", [row for row in rows if row.wrong])
    return [*listed("slower than the best peer", slower), *wrong]
