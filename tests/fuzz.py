"""Random problems against the float64 oracle: `make fuzz`, `python tests/fuzz.py --problems 300`.

:func:`cases` draws ``testing.Case``s, and ``testing.check`` holds each to the error budget, the
invariants and the promise about garbage. A part of the problems is called several times with other
values. A failure shrinks to a short case, printed as a program.
"""

import argparse
import dataclasses
import itertools
import math
import random
import sys
import time

import torch
from hypothesis import HealthCheck, Phase, currently_in_test_context, given, note, seed, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture import providers

from fastattn import testing
from fastattn.problem import call_cache
from fastattn.testing import Case

# hypothesis also draws numbers from the source of our modules that are imported so far. A seed then
# draws other problems in a whole run of the tests than alone, and others after a change.
providers.is_local_module_file = lambda path: False

# Around the sizes of tiles (4, 8, 16, 32, 64, 128), and one that is split where queries are few:
# kChunkKeys of csrc/cpu/choose.h.
LENGTHS = (3, 1, 2, 0, 4, 5, 7, 8, 9, 12, 13, 15, 16, 17, 31, 32, 33, 63, 64, 65, 70, 127, 128, 129,
           200, 300, 1200)  # fmt: skip
FEATURES = (3, 1, 2, 0, 4, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 40, 63, 64, 65, 127, 128, 129, 256)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LAYOUTS = ("bhmd", "bmhd", "bhdm", "sliced", "expanded", "unaligned")
LETTERS = ("", *("".join(x) for n in range(1, 5) for x in itertools.combinations("bhmn", n)))
GARBAGE = (math.nan, math.inf, -math.inf, 1e4, 3e38)
# Logits of a dot product grow with the square of the magnitude.
MAGNITUDES = {
    "dot": (1.0, 0.0, 1e-3, 1e-30, 5.0, 20.0, 100.0, 1e4),
    "additive": (1.0, 0.0, 1e-3, 1e-30, 5.0, 30.0, 1e4),
    "cosine": (1.0, 1e-2, 100.0),  # of lengths that are normal numbers in every dtype
    "gaussian": (1.0, 0.0, 1e-3, 1e-30, 3.0, 30.0, 1e4),
}
# Elements of the oracle's largest array.
MOST_ELEMENTS = 400_000


def _one_of(*choices):
    return st.sampled_from(choices)


@st.composite
def cases(draw) -> Case:
    """A problem. The first choice is always the simplest, to which failures shrink."""
    score = draw(_one_of("dot", "additive", "cosine", "gaussian"))
    dtype = draw(_one_of(*DTYPES, torch.float64))
    B, Hkv, group = draw(_one_of(1, 2, 3, 0)), draw(_one_of(1, 2, 0)), draw(_one_of(1, 2, 3))
    M, N = draw(_one_of(*LENGTHS)), draw(_one_of(*LENGTHS))
    if draw(_one_of(*range(10))) == 9:  # decoding
        M, N = 1, draw(_one_of(129, 200, 300, 1200, 2500))
    D, E = draw(_one_of(*FEATURES)), draw(_one_of(*FEATURES))
    pairwise = D if score in ("additive", "gaussian") else 1
    heads = B * Hkv * group
    while max(1, heads) * M * N * max(1, pairwise) > MOST_ELEMENTS:
        M, N, D = (M // 2, N, D) if M > N else (M, N // 2, D) if N > D else (M, N, D // 2)
        pairwise = min(pairwise, D)
    sizes = dict(B=B, H=Hkv * group, Hkv=Hkv, M=M, N=N, D=D, E=E)
    return Case(
        str(draw(st.integers(0, 999))), score, **sizes, dtype=dtype, drawn=True,
        **draw(_masks(dtype)), **draw(_results()), layout=draw(_one_of(*LAYOUTS)),
        mask_layout=draw(_one_of(*LAYOUTS)),
        # Larger magnitudes overflow the gradients in fp16.
        magnitude=draw(_one_of(*(x for x in MAGNITUDES[score] if x < 1e3 or dtype != DTYPES[1]))),
        opposite=draw(_one_of(0.0, 0.0, 25.0, 1e3)) if score == "additive" else 0.0,
        bandwidth=draw(_one_of("h", "", "d", "hd", "b", "bhd")) if score == "gaussian" else "h",
        softcap=draw(_one_of(0.0, 0.0, 1.0, 30.0)),
        # A float64 oracle of rows with a sink is not more exact than what it would judge.
        sink=draw(_one_of(None, None, 0.0, -8.0, 8.0, -math.inf)) if dtype in DTYPES else None,
        scale=draw(_one_of(None, 0.5, -3.0)) if score in ("dot", "cosine") else None,
    )  # fmt: skip


def _masks(dtype: torch.dtype):
    """Any of the masks and biases, together, and garbage where they exclude."""
    sides = _one_of(-1, 0, 1, 2, 5, 20, 64, 1000)
    letters = st.none() | st.sampled_from(LETTERS)
    lines = st.sampled_from(("alibi", "alibi-b", "relative"))
    wide = tuple(dict.fromkeys((dtype, torch.float32)))
    return st.fixed_dictionaries({}, optional=dict(
        causal=_one_of("top_left", "bottom_right"),
        window=st.tuples(sides, sides),
        kv_len=_one_of("batch", "rows", "sorted"),
        kv_begin=_one_of("batch", "rows", "sorted"),
        keep=letters,
        keep_rate=_one_of(0.7, 0.99, 0.05),
        empty_rows=st.booleans(),
        bias=letters | lines,
        bias_offset=_one_of(0, 1, -7, 200),
        bias_inf=st.booleans(),
        bias_grad=st.booleans(),
        bias_dtype=_one_of(*wide),
        attn_mask=letters,
        attn_mask_dtype=_one_of(torch.bool, *wide),
        garbage=st.none() | st.sampled_from(GARBAGE),
    ))  # fmt: skip


def _results():
    return st.fixed_dictionaries({}, optional=dict(
        weights=_one_of(None, "full", "mean"),
        lse=st.booleans(),
        dropout_p=_one_of(0.0, 0.3, 1.0),
    ))  # fmt: skip


def isas():
    """One of the instruction sets that this machine runs."""
    return st.deferred(lambda: st.sampled_from(torch.ops.fastattn.cpu_isas()))


def calls():
    """How often a problem is called. The fourth call has plans of both passes."""
    return _one_of(1, 1, 1, 4)


def _with_other_values(case: Case, calls: int) -> list[Case]:
    """The case, and others of its shapes."""
    return [case, *(dataclasses.replace(case, name=f"{case.name}-{n}") for n in range(1, calls))]


def program(case: Case, isa: str, calls: int = 1) -> str:
    """A program that checks one problem, and calls like it."""
    checks = "\n".join(f"check({x!r})" for x in _with_other_values(case, calls))
    return f"""\
import math, torch
from fastattn.testing import Case, check
assert torch.ops.fastattn.select_cpu_isa({isa!r})
{checks}"""


def check(case: Case, isa: str, calls: int = 1) -> None:
    """Checks a case with the CPU kernels of one instruction set, and repeated calls."""
    if currently_in_test_context():
        note(program(case, isa, calls))
    call_cache.forget()
    before = torch.ops.fastattn.cpu_isa()
    try:
        assert torch.ops.fastattn.select_cpu_isa(isa)
        for each in _with_other_values(case, calls):
            testing.check(each)
        t = testing.make(case)
        first, _, planned = (testing.run(case, t) for _ in range(3))
        testing.assert_same_bits(planned, first)  # backends/direct.py, repeated.py
    finally:
        torch.ops.fastattn.select_cpu_isa(before)


# ---- the command ----


def _batch(size: int, number: int, run) -> None:
    """Runs this many problems; raises the error of the shortest failing one."""
    quiet = settings(
        max_examples=size, deadline=None, database=None, print_blob=False,
        report_multiple_bugs=False, suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )  # fmt: skip
    seed(number)(quiet(given(cases(), isas(), calls())(run)))()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problems", type=int, default=sys.maxsize, help="how many to try")
    parser.add_argument("--seconds", type=float, default=math.inf, help="how long to try")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    args = parser.parse_args(argv)
    if args.problems == sys.maxsize and args.seconds == math.inf:
        args.seconds = 60.0
    torch.set_num_threads(1)
    print(f"seed {args.seed}: --seed {args.seed} tries the same problems", flush=True)
    start, tried, failed, shortest = time.monotonic(), 0, 0, ""

    def run(case: Case, isa: str, calls: int) -> None:
        nonlocal tried, shortest
        tried += 1
        try:
            check(case, isa, calls)
        except Exception:
            shortest = program(case, isa, calls)  # the last one to fail, after shrinking
            raise

    for number in itertools.count():
        left, spent = args.problems - tried, time.monotonic() - start
        if left <= 0 or spent >= args.seconds:
            break
        try:
            # Neighbouring seeds have no batch in common.
            _batch(min(100, left), (args.seed << 32) + number, run)
        except Exception as error:
            failed += 1
            print(f"\n{type(error).__name__}: {error}\n{shortest}\n", flush=True)
        found = f", {failed} failures" if failed else ""
        print(f"{time.monotonic() - start:5.0f} s: {tried} problems{found}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
