"""The command: ``python -m bench.summary``: the committed runs of ``make bench`` as README's table.

Each cell has the best peer's time over ours, forward and then forward with backward: ``≤`` where
others had no time, and ``-`` for a direction that the suite does not time. In brackets is the share
of what the machine can do (``limits.py``), where the run measured that.
"""

from __future__ import annotations

import json
from pathlib import Path

from bench.cases import DIRECTIONS, named
from bench.report import ratio_of

RESULTS = Path(__file__).parent / "results"
RUNS = {
    "two AMD Zen 5 cores, AVX512-BF16": "amd-epyc-family-26-avx512-bf16-2-threads",
    "two AMD Zen 4 cores, AVX512-BF16": "amd-epyc-family-25-avx512-bf16-2-threads",
    "two AMD Zen 3 cores, AVX2": "amd-epyc-family-25-avx2-2-threads",
    "two Intel Xeon cores, AVX-512": "intel-r-xeon-r-processor-family-6-avx512-2-threads",
    "two Intel Xeon cores, AMX": "intel-r-xeon-r-processor-family-6-amx-2-threads",
}


def table() -> str:
    """Markdown: a row for each case, a column for each machine."""
    runs = [_by_case(RESULTS / folder / "bench.json") for folder in RUNS.values()]
    names = dict.fromkeys(case for run in runs for case, _ in run)
    lines = [["case", *RUNS], ["---"] * (1 + len(RUNS))]
    lines += [[name, *(_cell(run, name) for run in runs)] for name in names]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _by_case(path: Path) -> dict[tuple[str, str], dict]:
    rows = json.loads(path.read_text("utf-8"))["rows"]
    return {(row["case"], row["direction"]): row for row in rows}


def _cell(run: dict[tuple[str, str], dict], case: str) -> str:
    timed = named(case).directions
    found = {d: _gain(run[case, d]) for d in DIRECTIONS if d in timed and (case, d) in run}
    return ", ".join(found.get(d, "-") for d in DIRECTIONS) if found else "not measured"


def _gain(row: dict) -> str:
    share = row.get("of_bound")
    return ratio_of(row["speedup"], row["skipped"]) + (f" ({share:.0%})" if share else "")


if __name__ == "__main__":
    print(table())
