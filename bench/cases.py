"""The named cases: which problem at which size, on which inputs, and how much work it is.

Sizes, features and inputs are those of ``fastattn.testing``. This file adds the masks of real
models (padding, blocks), instead of the tests' adversarial ones.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from bench import packed
from fastattn import Mask, testing
from fastattn.problem import Problem, validate

FORWARD, BOTH = "forward", "forward+backward"
DIRECTIONS = (FORWARD, BOTH)


@dataclass(frozen=True)
class Case:
    """One named case: a problem of the test grid, and what the grid does not have.

    ``keys``: ``"all"``; ``"padding"``, a bool mask [B, 1, 1, N] over a padded batch; ``"lengths"``,
    the same keys given by their number [B]; ``"blocks"``, a bool mask [1, 1, M, N] of random
    blocks that keeps the share ``kept``; ``"documents"``, a bool mask [1, 1, M, N] of causal texts
    packed end to end; ``"packed"``, causal texts by their lengths, ``mean`` on average.
    ``module``: through nn.MultiheadAttention's interface, projections included.
    ``compiled``: torch.compile is a peer, and so is the code that it compiles. So is FlexAttention,
    on a CPU forward only. That takes seconds, so only where one may win: elsewhere torch.compile
    can at best find torch's own SDPA.
    ``others``: other packages are peers too: ``packages.py``.
    ``directions``: the directions that are timed.
    """

    name: str
    about: str
    problem: testing.Case
    keys: str = "all"
    kept: float = 1 / 4
    mean: int = 0
    module: bool = False
    need_weights: bool = False
    compiled: bool = False
    others: bool = False
    directions: tuple[str, ...] = DIRECTIONS

    @property
    def shape(self) -> str:
        """The sizes and the dtype, in a few letters."""
        c = self.problem
        return f"B{c.B} H{c.H} M{c.M} N{c.N} D{c.D} {str(c.dtype).removeprefix('torch.')}"

    def tiny(self) -> Case:
        """The same case with every size cut, for warm-up and for tests of this suite."""
        p = self.problem
        groups = 1 if p.H != p.Hkv else 2
        cut = {"B": 2, "H": 2, "Hkv": groups, "M": 64, "N": 64, "D": 16, "E": 16}
        sizes = {letter: min(getattr(p, letter), size) for letter, size in cut.items()}
        problem = dataclasses.replace(p, **sizes)
        return dataclasses.replace(
            self, problem=problem, mean=min(self.mean, max(1, problem.N // 4))
        )


def _dot(name: str, **changes) -> testing.Case:
    sizes = dict(B=2, H=8, Hkv=8, M=1024, N=1024, D=64, E=64)
    return testing.Case(name, **{**sizes, **changes})


def _additive(name: str, B: int, N: int, D: int) -> testing.Case:
    return testing.Case(name, "additive", B=B, H=1, Hkv=1, M=N, N=N, D=D, E=D)


def _gaussian(name: str, N: int) -> testing.Case:
    sizes = dict(B=2, H=1, Hkv=1, M=N, N=N, D=8, E=8)
    return testing.Case(name, "gaussian", bandwidth="", **sizes)  # pyright: ignore[reportArgumentType]


_BF16 = torch.bfloat16
_FOUR_K = _dot("4k", B=1, M=4096, N=4096, D=128, E=128)
_PADDING = _dot("padding")
_BIAS = _dot("bias", M=512, N=512, bias="hmn")
_MHA = _dot("mha", B=4, M=512, N=512)
_MHA_DROPOUT = dataclasses.replace(_MHA, dropout_p=0.1)
_SMALL, _LARGE = _additive("small", 2, 512, 64), _additive("large", 8, 256, 256)

CASES = [
    Case("dense", "fp32", _dot("dense")),
    Case("dense-bf16", "bf16", _dot("dense", dtype=_BF16)),
    Case("dense-4k", "fp32, one long sequence, head size 128", _FOUR_K),
    Case("dense-4k-bf16", "bf16", dataclasses.replace(_FOUR_K, dtype=_BF16)),
    Case("causal", "is_causal=True", _dot("causal", causal="top_left")),
    Case("padding", "padded keys, bool attn_mask [B, 1, 1, N]", _PADDING, "padding"),
    Case("padding-len", "the same; ours is given Mask(kv_len)", _PADDING, "lengths"),
    Case("blocks", "bool attn_mask [M, N] of random blocks, 64 wide", _dot("blocks"), "blocks",
         compiled=True),
    Case("bias-grad", "float bias [H, M, N] with gradient", _BIAS, compiled=True),
    Case("decode", "one query", _dot("decode", B=4, M=1, N=4096)),
    Case("additive-small", "additive score, one head", _SMALL, compiled=True),
    Case("additive-large", "additive score, one head", _LARGE, compiled=True),
    Case("gaussian", "kernel regression with 8 features", _gaussian("2k", 2048), compiled=True),
    Case(
        "mha-weights", "nn.MultiheadAttention, need_weights=True", _MHA,
        module=True, need_weights=True, compiled=True,
    ),
    Case(
        "mha-dropout", "the same with dropout=0.1, in training", _MHA_DROPOUT,
        module=True, need_weights=True, compiled=True, directions=(BOTH,),
    ),
    Case("mha", "nn.MultiheadAttention, need_weights=False", _MHA, module=True, compiled=True),
]  # fmt: skip


def _gpu(name: str, **changes) -> testing.Case:
    sizes = dict(B=2, H=16, Hkv=16, M=4096, N=4096, D=128, E=128, dtype=_BF16)
    return testing.Case(name, **{**sizes, **changes})


_LONG = _gpu("16k", B=1, H=8, Hkv=8, M=16384, N=16384)
_D64 = dict(B=4, D=64, E=64)
_GROUPED = _gpu("decode", B=16, H=32, Hkv=8, M=1, N=16384)
_GPU_BIAS = _gpu("bias", M=1024, N=1024, bias="hmn", **_D64)
_GPU_ADDITIVE = dataclasses.replace(_additive("2k", 4, 2048, 256), dtype=_BF16)
_GPU_MHA = _gpu("mha", M=1024, N=1024, **_D64)

# Sizes that fill a GPU.
GPU_CASES = [
    Case("d128-4k", "bf16", _gpu("4k"), compiled=True),
    Case("d128-4k-causal", "is_causal=True", _gpu("4k", causal="top_left"), compiled=True),
    Case("d128-16k", "bf16", _LONG),
    Case("d128-16k-causal", "is_causal=True", dataclasses.replace(_LONG, causal="top_left")),
    Case("d64-4k", "bf16", _gpu("d64", **_D64)),
    Case("d64-4k-causal", "is_causal=True", _gpu("d64", causal="top_left", **_D64)),
    Case("padding-4k", "padded keys, bool [B, 1, 1, N]", _gpu("padding"), "padding", compiled=True),
    Case("blocks-4k", "bool [M, N] of random blocks", _gpu("blocks"), "blocks", 1 / 2,
         compiled=True),
    Case("bias-grad-1k", "float bias [H, M, N] with gradient", _GPU_BIAS, compiled=True),
    Case("decode-16k", "one query, 4 query heads a key head", _GROUPED),
    Case("additive-2k", "additive score, one head", _GPU_ADDITIVE, compiled=True),
    Case(
        "mha-weights-1k", "nn.MultiheadAttention, need_weights=True", _GPU_MHA,
        module=True, need_weights=True, compiled=True,
    ),
]  # fmt: skip

# The attention of widely used models, at their published sizes.
MODEL_CASES = [
    Case("bert-base", "encoder, padded batch", _dot("bert", B=4, H=12, Hkv=12, M=512, N=512),
         "padding"),
    Case("gpt2", "decoder, causal",
         _dot("gpt2", B=1, H=12, Hkv=12, causal="top_left")),
    Case("vit-b16", "197 patches", _dot("vit", B=8, H=12, Hkv=12, M=197, N=197)),
    Case("detr-cross", "100 object queries over padded pixels",
         _dot("detr", B=4, M=100, N=850, D=32, E=32), "padding"),
    Case("whisper-small", "encoder, 30 s of sound",
         _dot("whisper", B=1, H=12, Hkv=12, M=1500, N=1500)),
    Case("llama-decode", "one query, 4 query heads a key head",
         _dot("decode", B=4, H=32, M=1, N=2048, D=128, E=128, dtype=_BF16)),
    Case("seq2seq-step", "additive, one step over 50 words",
         dataclasses.replace(_additive("step", 32, 50, 512), M=1), compiled=True),
    Case("tacotron2-step", "additive, one step over 200 letters",
         dataclasses.replace(_additive("step", 32, 200, 128), M=1, E=512), compiled=True),
    Case("pair-bias", "one bias [H, M, N] with gradient for 32 rows, as AlphaFold's",
         _dot("pair", B=32, H=4, Hkv=4, M=256, N=256, D=32, E=32, bias="hmn"), compiled=True),
    Case("alibi", "causal, linear biases",
         _dot("alibi", B=1, causal="top_left", bias="alibi", bias_grad=False)),
    Case("t5", "encoder, a learned bias of each distance up to 20, as T5's buckets",
         _dot("t5", M=512, N=512, bias="relative")),
    Case("documents", "8 texts packed, each causal",
         _dot("documents", B=1, H=12, Hkv=12, M=2048, N=2048), "documents",
         compiled=True),
    Case("long-16k", "16k tokens, causal",
         _dot("long", B=1, H=2, Hkv=2, M=16384, N=16384, causal="top_left")),
]  # fmt: skip

# Packed documents; what acts on every score or row, beside the same call without it; few tokens.
_CAPPED = _dot("softcap", softcap=30.0)
_FEW = _dot("few", B=1, M=16, N=16)
_STEP = dataclasses.replace(_additive("few", 32, 20, 64), M=1)
EXTRAS_CASES = [
    *(Case(f"packed-{N // 1024}k-{mean}", f"causal texts of {mean} tokens on average",
           _dot("packed", B=1, H=2, Hkv=2, M=N, N=N), "packed", mean=mean)
      for N in (4096, 32768) for mean in (100, 512)),
    Case("softcap", "30 tanh(score / 30)", _CAPPED, compiled=True),
    Case("sink", "a logit a head without a value", _dot("sink", sink=0.0), compiled=True),
    # What a call costs beside its arithmetic. With one key there is no mask to speak of.
    Case("few-1", "one token", _dot("few", B=1, M=1, N=1)),
    Case("few-16", "16 tokens", _FEW),
    Case("few-16-bf16", "16 tokens", dataclasses.replace(_FEW, dtype=_BF16)),
    Case("few-16-padding", "16 tokens, a bool mask of keys", _FEW, "padding"),
    Case("few-16-lengths", "16 tokens, Mask(kv_len)", _FEW, "lengths"),
    Case("few-additive", "additive score, one query of a decoder", _STEP),
]  # fmt: skip

# The special path of nn.MultiheadAttention, which is evaluation without weights. Then training in
# half types, which torch multiplies slowly on some CPUs.
MODULES_CASES = [
    *(Case(f"mha-{B}-{N}", "nn.MultiheadAttention in eval, need_weights=False",
           _dot("mha", B=B, M=N, N=N), module=True, directions=(FORWARD,))
      for B in (1, 8, 64) for N in (16, 128, 512, 2048)),
    *(Case(f"mha-8-128-{name}", "nn.MultiheadAttention in training, need_weights=False",
           _dot("mha", B=8, M=128, N=128, dtype=dtype), module=True, directions=(BOTH,))
      for name, dtype in (("bf16", _BF16), ("fp16", torch.float16))),
]  # fmt: skip


def _beside_others(suite: list[Case], *directions: str) -> list[Case]:
    return [
        dataclasses.replace(case, name=f"{case.name}-others", others=True, compiled=case.compiled
                            and suite is GPU_CASES, directions=directions)
        for case in suite if case.problem.score == "dot" and not case.module
        and case.keys in ("all", "padding") and case.problem.bias is None
    ]  # fmt: skip


_DECODE_BF16 = _dot("decode", B=4, M=1, N=4096, dtype=_BF16)
PEERS_CASES = [
    *_beside_others(CASES, FORWARD),
    Case("decode-bf16-others", "one query", _DECODE_BF16, others=True, directions=(FORWARD,)),
]
PEERS_GPU_CASES = _beside_others(GPU_CASES, *DIRECTIONS)

# Lengths that double; bench/scaling.py fits the growth of time and memory.
SCALING_CASES = [
    *(Case(f"dot-{n}", "fp32", _dot("dot", B=1, M=n, N=n), compiled=True)
      for n in (256, 512, 1024, 2048, 4096)),
    *(Case(f"additive-{n}", "one head", _additive("additive", 1, n, 64), compiled=True)
      for n in (256, 512, 1024, 2048)),
]  # fmt: skip
SUITES = {
    "cpu": CASES,
    "cuda": GPU_CASES,
    "models": MODEL_CASES,
    "modules": MODULES_CASES,
    "extras": EXTRAS_CASES,
    "peers": PEERS_CASES,
    "peers-cuda": PEERS_GPU_CASES,
    "scaling": SCALING_CASES,
}
QUICK = (  # one of each kind, for a self-test
    "dense", "blocks", "additive-small", "mha-weights",
    "d128-4k", "blocks-4k", "additive-2k", "mha-weights-1k",
    "documents", "tacotron2-step", "llama-decode", "decode-16k",
    "mha-8-128", "padding-others", "padding-4k-others", "packed-4k-100", "softcap", "sink",
)  # fmt: skip


def named(name: str) -> Case:
    """The case of that name, from any suite; behind it may be a backend, in brackets."""
    name = name.partition(" (")[0]
    return next(case for suite in SUITES.values() for case in suite if case.name == name)


def draw(case: Case, device: str = "cpu") -> testing.Tensors:
    """The inputs of a case: always the same numbers on one kind of device.

    They are drawn on the device: a CPU takes seconds for inputs that fill a GPU.
    """
    t = testing.make(case.problem, device)
    return dataclasses.replace(t, mask=_mask(case, t.mask).to(device))


def _mask(case: Case, drawn: Mask) -> Mask:
    p = case.problem
    # Unequal, as in real batches: threads that split by batch entry then wait.
    lengths = torch.linspace(p.N / 4, p.N - p.N / 4, p.B).round().int()
    if case.keys == "padding":
        return Mask(keep=(torch.arange(p.N) < lengths[:, None])[:, None, None])
    if case.keys == "lengths":
        return Mask(kv_len=lengths)
    if case.keys == "packed":
        return Mask.documents(lengths=packed.lengths(p.N, case.mean), causal=True)
    if case.keys == "documents":
        text = torch.arange(p.N) * 8 // p.N
        same = text[: p.M, None] == text
        return Mask(keep=(same & torch.ones(p.M, p.N).tril().bool())[None, None])
    if case.keys == "blocks":
        return Mask(
            keep=_random_blocks(p.M, p.N, block=max(p.N // 16, 1), kept=case.kept)[None, None]
        )
    return drawn


def _random_blocks(M: int, N: int, block: int, kept: float) -> torch.Tensor:
    """Exactly this share of every row of blocks, always with the diagonal block: no row is empty.

    torch gives NaN for a row without a key, and its result could not be compared.
    """
    rng = torch.Generator().manual_seed(0)
    rows, columns = -(-M // block), -(-N // block)
    rank = torch.rand(rows, columns, generator=rng)
    rank.diagonal().fill_(-1)
    chosen = rank.argsort(-1).argsort(-1) < max(round(kept * columns), 1)
    return chosen.repeat_interleave(block, 0).repeat_interleave(block, 1)[:M, :N].contiguous()


def problem(case: Case, t: testing.Tensors) -> Problem:
    """The validated record of a case's attention; for a module, that of its heads."""
    score, grouped = case.problem.score, case.problem.H != case.problem.Hkv
    bias = testing.given_bias(case.problem, t.bias)
    options = dict(mask=t.mask, bias=bias, enable_gqa=grouped and score != "additive")
    options |= dict(softcap=case.problem.softcap) if case.problem.softcap else {}
    parameter = t.w if t.bandwidth is None else t.bandwidth
    return validate.build(score, t.q, t.k, t.v, parameter, **options).p


def kept_pairs(case: Case, t: testing.Tensors) -> int:
    """Pairs (b, h, i, j) that the mask keeps and a kernel must compute."""
    p = problem(case, t)
    if case.keys == "packed":  # no M x N matrix
        begins, ends = t.mask.kv_begin, t.mask.kv_len
        return p.B * p.H * int((ends - begins).sum())
    kept = p.kept()
    repeated = (p.B * p.H * p.M * p.N) // max(kept.numel(), 1)  # in the dims it broadcasts over
    return int(kept.sum()) * repeated


def work(case: Case, pairs: int, direction: str) -> tuple[float, str]:
    """(amount, unit) of one call over this many kept pairs.

    FLOP of a dot product: 2 (D + E) a pair forward and 2.5 times that backward; a module's four
    projections add 8 d_model^2 a token forward and twice that backward. Other scores count score
    elements, D a pair, the same number in either direction.
    """
    c = case.problem
    if c.score != "dot":
        return float(pairs * c.D), "score elements"
    flop = 2 * pairs * (c.D + c.E) * (3.5 if direction == BOTH else 1)
    if case.module:
        flop += 8 * c.B * c.N * (c.H * c.D) ** 2 * (3 if direction == BOTH else 1)
    return float(flop), "FLOP"
