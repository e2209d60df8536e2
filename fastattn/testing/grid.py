"""The case grid: every size against every tile, every feature alone, and features together."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from fastattn.testing.cases import Case

_f16, _bf16 = torch.float16, torch.bfloat16


def _grid() -> list[Case]:
    """Every size against every tile, every feature alone, and features together."""
    sizes = [Case(f"M{m}-N{n}", M=m, N=n, lse=True) for m, n in
             [(1, 1), (15, 63), (63, 15), (65, 127), (127, 65), (1, 1000), (1000, 1), (130, 300),
              (4, 257)]]  # fmt: skip
    sizes.append(Case("M1000-N1000", B=1, H=1, Hkv=1, M=1000, N=1000, lse=True))
    dims = [Case(f"D{d}-E{e}", D=d, E=e) for d, e in
            [(1, 1), (3, 5), (16, 33), (64, 64), (65, 8), (8, 127), (24, 136),
             (256, 40)]]  # fmt: skip
    zeros = [
        replace(Case(f"{name}0", bias="mn", weights="full", lse=True), **{name: 0})
        for name in ("M", "N", "D", "E", "B")
    ]
    zeros.append(Case("H0", H=0, Hkv=0, bias="mn", weights="full", lse=True))
    zeros.append(Case("H0-mean", H=0, Hkv=0, weights="mean"))
    heads = [
        Case("gqa", H=6, Hkv=2, M=65),
        Case("mqa", H=3, Hkv=1, N=70),
        Case("gqa-decode", H=8, Hkv=2, M=1, N=300),
        Case("gqa-few", H=4, Hkv=2, M=12, N=70, D=64, keep="hn", kv_len="rows", lse=True),
    ]
    layouts = [Case(f"layout-{x}", layout=x, M=33, N=65, D=20, weights="full", causal="top_left")
               for x in ("bmhd", "sliced", "expanded")]  # fmt: skip
    masks = [
        Case("causal", causal="top_left", M=130, N=130),
        Case("causal-wide", causal="top_left", M=40, N=100, lse=True),
        Case("causal-tall", causal="top_left", M=100, N=40, lse=True),
        Case("bottom-right", causal="bottom_right", M=40, N=100),
        Case("bottom-right-tall", causal="bottom_right", M=100, N=40,
             lse=True),  # the first 60 rows are empty
        Case("window", window=(5, 3), M=130, N=130),
        Case("window-causal", causal="bottom_right", window=(20, -1), M=70, N=150),
        Case("window-far", window=(2, 2), M=130, N=20, lse=True),
        Case("kv-len", kv_len="batch", N=150, lse=True, weights="mean"),
        Case("kv-len-rows", kv_len="rows", M=70, N=150, lse=True),
        Case("kv-begin", kv_begin="batch", N=150, lse=True, weights="mean"),
        Case("intervals", kv_begin="rows", kv_len="rows", M=70, N=140, lse=True, weights="full",
             bias="hmn", dropout_p=0.2),
        *[
            Case(f"documents-{m}", kv_begin="sorted", kv_len="sorted", Hkv=1, M=m, N=2 * m,
                 lse=True)
            for m in (70, 150)
        ],
        *[Case(f"keep-{x}", keep=x, M=65, N=70) for x in ("bhmn", "mn", "bn", "h", "bm", "")],
        Case("keep-run", keep="bn", keep_run=True, M=65, N=400, Hkv=1),
        Case("keep-causal", keep="bn", causal="top_left", M=65, N=130),
        Case("keep-sparse", keep="bhmn", keep_rate=0.01, M=130, N=200, lse=True, weights="full"),
        Case("keep-empty-rows", keep="bmn", empty_rows=True, lse=True, weights="mean"),
        Case("all-masks", causal="bottom_right", window=(60, -1), kv_len="batch", keep="hn",
             kv_begin="rows", bias="bmn", M=65, N=130),
    ]  # fmt: skip
    biases = [
        *[
            Case(f"bias-{x}", bias=x, M=40, N=70)
            for x in ("bhmn", "hmn", "mn", "bn", "n", "bhm", "h", "")
        ],
        Case("bias-inf", bias="bhmn", bias_inf=True, empty_rows=True, M=40, N=70, lse=True,
             weights="full"),
        Case("garbage-groups", kv_len="batch", bias="hmn", bias_dtype=torch.float32, H=4, Hkv=2,
             M=33, N=70, dropout_p=0.3, weights="mean", layout="unaligned", mask_layout="bhdm",
             garbage=math.nan),
        Case("garbage-few", keep="bhmn", attn_mask="bmn", M=3, N=70, layout="bhdm",
             mask_layout="sliced", lse=True, garbage=math.inf),
        Case("bias-inf-n", bias="bn", bias_inf=True, N=200),
        Case("bias-no-grad", bias="mn", bias_grad=False),
        Case("bias-large", bias="hmn", M=100, N=300),
        Case("bias-gqa", bias="hmn", H=4, Hkv=2, M=33, N=70),
    ]  # fmt: skip
    lines = [
        Case("alibi", bias="alibi", M=65, N=130, lse=True, weights="full"),
        Case("alibi-causal", bias="alibi-b", causal="bottom_right", bias_offset=200, H=4, Hkv=2,
             M=130, N=330, lse=True),
        Case("alibi-tall", bias="alibi", M=300, N=40, softcap=2.0, dropout_p=0.3),
        Case("alibi-decode", bias="alibi", bias_offset=299, M=1, N=300),
        Case("alibi-whole", bias="alibi", B=1, M=128, N=256),
        Case("relative", bias="relative", M=40, N=70, weights="mean"),
        Case("relative-masks", bias="relative", bias_inf=True, bias_offset=-7, kv_len="rows",
             kv_begin="rows", keep="hn", M=65, N=130, weights="full", dropout_p=0.2),
        Case("relative-added", bias="relative", attn_mask="mn", attn_mask_dtype=torch.float32,
             M=33, N=20),
        Case("relative-added-M0", bias="relative", attn_mask="mn", attn_mask_dtype=torch.float32,
             M=0, N=5),
        Case("relative-no-grad", bias="relative", bias_grad=False, M=3, N=5),
    ]  # fmt: skip
    weights = [
        Case(f"weights-{x}", weights=x, H=3, Hkv=3, M=65, N=130, causal="top_left")
        for x in ("full", "mean")
    ]
    dropout = [
        Case("dropout", dropout_p=0.3, M=65, N=130, weights="full"),
        Case("dropout-mean", dropout_p=0.5, M=33, N=67, weights="mean", keep="bhmn", lse=True),
        Case("dropout-all", dropout_p=1.0),
        Case("dropout-decode", dropout_p=0.3, M=1, N=300),
    ]
    caps = [
        Case("softcap", B=1, softcap=1.0, M=65, N=70, weights="full", lse=True),
        Case("softcap-masks", softcap=2.0, causal="bottom_right", window=(60, -1), kv_len="batch",
             keep="hn", bias="bmn", bias_inf=True, M=65, N=130, dropout_p=0.3,
             weights="mean"),
        Case("softcap-50", B=1, softcap=50.0, magnitude=4.0, M=64, N=128, D=64, lse=True),
        Case("softcap-few", softcap=1.5, H=4, M=3, N=300, kv_len="rows", weights="full"),
        Case("softcap-decode", softcap=1.5, M=1, N=300),
    ]  # fmt: skip
    # The last one asks for nothing else, and its sinks have no gradient.
    sinks = [
        Case("sink", sink=0.0, causal="bottom_right", kv_len="batch", H=4, Hkv=2, M=33, N=70,
             weights="full", lse=True, garbage=math.nan),
        Case("sink-masks", sink=2.0, softcap=2.0, keep="bhmn", bias="bmn", bias_inf=True,
             empty_rows=True, dropout_p=0.3, weights="mean", lse=True, M=20, N=40),
        Case("sink-decode", sink=1.0, H=8, Hkv=2, M=1, N=300, lse=True),
        Case("sink-few", sink=-1.0, bias="alibi", bias_grad=False, M=3, N=300),
    ]  # fmt: skip
    large = [Case("large-logits", magnitude=60.0, M=40, N=70, lse=True)]
    # Whole tiles, which no mask code touches; as large as the logits of the dot product are named.
    plain = [Case(f"plain-N{n}", B=1, M=64, N=n, weights="full", lse=True) for n in (64, 128)]
    logits = [
        replace(c, name=f"{c.name}-logits-1e{power}", magnitude=10 ** (power / 2))
        for c in plain
        for power in (2, 4, 6, 10)
    ]
    both = [
        *sizes, *dims, *zeros, *layouts, *masks, *biases, *lines, *weights, *dropout, *heads, *caps,
        *sinks, *large, *plain,
    ]  # fmt: skip
    # Additive sizes are cut where plain PyTorch's M * N * D, not ours, would take the time.
    extremes = [
        Case("huge", magnitude=1e4, M=40, N=70),
        Case("wide", magnitude=30.0, M=40, N=70),
        Case("opposite-60", opposite=60.0, M=40, N=70),
        Case("opposite-1e4", opposite=1e4, M=20, N=70),
        Case("opposite-25", opposite=25.0, magnitude=0.3, M=20, N=70, D=65),
    ]
    # The gaussian's loops are those of its score, its masks and heads everyone's.
    gaussian = {
        *("M1-N1", "M65-N127", "M4-N257", "D1-E1", "D3-E5", "D65-E8", "gqa", "layout-sliced"),
        *("layout-expanded", "all-masks", "kv-len", "kv-len-rows", "keep-empty-rows", "bias-inf"),
        *("kv-begin", "intervals", "documents-70", "gqa-few"),
        *("bias-hmn", "weights-full", "weights-mean", "dropout", "dropout-all", "mqa"),
        *("relative-masks", "garbage-groups", "garbage-few", "D24-E136"),
        *("plain-N64", "plain-N128", *(c.name for c in (*zeros, *caps, *sinks))),
    }
    bandwidths = [Case(f"bandwidth-{x}", bandwidth=x, M=40, N=70, lse=True)
                  for x in ("", "d", "hd", "b", "bhd")]  # fmt: skip
    distances = [extremes[0], Case("near", magnitude=1e-28, M=40, N=70)]
    cases = [
        *both,
        *logits,
        *(replace(c, score="additive") for c in both),
        *(replace(c, score="additive") for c in extremes),
        *(replace(c, score="gaussian") for c in both if c.name in gaussian),
        *(replace(c, score="gaussian") for c in [*bandwidths, *distances]),
    ]
    half = {
        *("M65-N127", "M1-N1000", "D64-E64", "gqa", "layout-sliced", "all-masks", "documents-70"),
        *("garbage-groups", "bias-inf", "gqa-few"),
        *("bias-hmn", "weights-mean", "dropout", "large-logits", "huge", "opposite-60"),
        *("softcap", "softcap-masks", "softcap-50", "alibi-causal", "relative-masks"),
        *("sink", "sink-masks", "plain-N128-logits-1e4"),
    }
    return cases + [replace(c, dtype=d) for c in cases if c.name in half for d in (_f16, _bf16)]


GRID = _grid()
