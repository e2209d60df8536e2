"""Measures which tiles make the Triton kernels fastest on this GPU, and remembers them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastattn import scores
from fastattn.backends import registry, triton, wgmma
from fastattn.problem import Problem, validate

if TYPE_CHECKING:
    from fastattn.kernels.host.config import Config

Measure = Callable[[Callable[[], object]], float]  # a call -> its time, in any unit


def autotune(
    query: Tensor | Problem,
    key: Tensor | None = None,
    value: Tensor | None = None,
    weight: Tensor | None = None,
    *,
    measure: Measure | None = None,
    **options: Any,
) -> dict[str, Config]:
    """Finds the fastest tile sizes, warps and pipeline stages of the kernels behind a call.

    Later calls use the result if element size, head sizes (rounded up to powers of two) and kind
    are the same. The kind is the first that fits: with a bias of larger elements than query's; with
    two of dropout, bias, weights and softcap; with one of the first three; with a softcap; plain.
    Outputs change by rounding only.

    The file ``$XDG_CACHE_HOME/fastattn/autotune.json`` (``~/.cache`` by default) keeps results for
    other processes, by device and version of Triton. Each is written as soon as it is found. Delete
    the file to forget them. A result that does not fit a later call is forgotten with a warning.

    The search starts from the built-in table. It moves to a neighbour (half or twice a tile size,
    other warps, one stage more or less) as long as one is faster. This compiles tens of kernels and
    takes minutes.

    On a GPU of compute capability 9.0, the self-check of the CUDA path ``wgmma`` runs as well.
    Where that path is right, ``backend="auto"`` prefers it.

    Args:
        query: as in :func:`scaled_dot_product_attention`, or in :func:`additive_attention` if
            weight is given. Or a validated :class:`fastattn.problem.Problem`, whose inputs are
            drawn.
        key: likewise; query by default.
        value: likewise; key by default.
        weight: likewise.
        measure: takes a call and returns its time. Default: the median on the device's clock.
        **options: the call's other arguments, :func:`attention`'s ``score`` and ``bandwidth`` among
            them. ``backend``, ``sink`` and ``return_lse`` change no kernel.

    Returns:
        The configuration of each kernel: ``(BLOCK_M, BLOCK_N, num_warps, num_stages)`` by name.

    Raises:
        TypeError: as the function that is called; or a Problem comes with other arguments.
        ValueError: likewise, or the Triton backend cannot compute this problem. The message then
            has the reasons.
        RuntimeError: no configuration of a kernel runs. Nothing is remembered of that kernel.

    Example:
        >>> q = torch.randn(4, 16, 4096, 128, device="cuda", dtype=torch.bfloat16)
        >>> fastattn.autotune(q, is_causal=True)
    """
    inputs = _inputs(query, key, value, weight, options)
    registry.select(inputs.p, "triton")
    from fastattn.kernels.host import config, launch, tuned  # imports Triton

    p = inputs.p
    sizes = config.padded(p.D), config.padded(p.E)
    kind = launch.Call(*inputs[1:6], *p.operands).kind
    found = {}
    with triton.current_device(p.device):  # whose clock measures
        for kernel, call in _progress(_calls(inputs)):
            name = tuned.name(kernel, p.dtype, *sizes, kind)
            with_config = _timer(name, call, measure or _median)
            start = config.choose(kernel, p.device, p.dtype, *sizes, kind)
            found[name] = _descend(start, with_config)
            tuned.remember(p.device, {name: found[name]})
    if p.score == "dot":
        wgmma.is_right(p.device, may_check=True)
    return found


def _inputs(
    query: Tensor | Problem,
    key: Tensor | None,
    value: Tensor | None,
    weight: Tensor | None,
    options: dict[str, Any],
) -> validate.Inputs:
    if not isinstance(query, Problem):
        key = query if key is None else key
        value = key if value is None else value
        return scores.checked(query, key, value, weight, **options)[0]
    if options or not (key is value is weight is None):
        raise TypeError("query: a Problem has all arguments of a call; expected no other")
    p = query

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=p.dtype, device=p.device)

    q, k, v = draw(p.B, p.H, p.M, p.D), draw(p.B, p.Hkv, p.N, p.D), draw(p.B, p.Hkv, p.N, p.E)
    w = None if p.score == "dot" else draw(p.H, p.D)
    if p.score == "gaussian":  # bandwidths
        w = torch.rand(p.H, p.D, device=p.device) + 0.5
    return validate.Inputs(p, q, k, v, w, None, (p.B,), True)


def _calls(inputs: validate.Inputs) -> list[tuple[str, Callable[[], object]]]:
    """(kernel of config.TABLE, a call that runs it). Kernels that others depend on come first."""
    p, q, k, v, w, bias, *_ = inputs

    def forward() -> tuple[Tensor, ...]:
        return triton.forward(p, q, k, v, w, bias)

    out, _, weights, stats = forward()
    grad_out = torch.randn_like(out)
    grad_weights = None if p.weights == "none" else torch.randn_like(weights)

    def backward() -> tuple[Tensor | None, ...]:
        grads = (grad_out, None, grad_weights)
        return triton.backward(p, q, k, v, w, bias, out, stats, *grads, bias is not None)

    from fastattn.kernels.host.config import row_name
    from fastattn.kernels.host.launch import FEW_QUERIES

    few = p.M <= FEW_QUERIES
    own = {"dot": ["decode_dq", "decode_dkdv"], "additive": ["decode_bwd"]} if few else {}
    calls = [("decode" if few else "fwd", forward)]
    calls += [(kernel, backward) for kernel in (*own.get(p.score, ["dq", "dkdv"]), "tile")]
    return [(row_name(p.score, kernel), call) for kernel, call in calls]


def _timer(name: str, call: Callable[[], object], measure: Measure) -> Callable[[Config], float]:
    from fastattn.kernels.host import tuned

    def time_of(config: Config) -> float:
        with tuned.trial(name, config):
            try:
                return measure(call)
            except Exception:  # too much shared memory, too many registers, no such layout
                return math.inf

    return time_of


def _descend(start: Config, time_of: Callable[[Config], float]) -> Config:
    """The best configuration that single steps reach."""
    times = {start: time_of(start)}
    best = start
    while True:
        for config in _neighbours(best):
            if config not in times:
                times[config] = time_of(config)
        fastest = min(times, key=times.__getitem__)
        if math.isinf(times[fastest]):
            raise RuntimeError("no configuration runs: call the function itself to see why")
        if times[fastest] >= times[best]:
            return best
        best = fastest


def _neighbours(c: Config) -> list[Config]:
    from fastattn.kernels.host import tuned

    blocks = [c._replace(BLOCK_M=m) for m in (c.BLOCK_M // 2, c.BLOCK_M * 2)]
    blocks += [c._replace(BLOCK_N=n) for n in (c.BLOCK_N // 2, c.BLOCK_N * 2)]
    blocks = [b for b in blocks if {b.BLOCK_M, b.BLOCK_N} <= {*tuned.BLOCKS}]
    stages = [c._replace(num_stages=s) for s in (c.num_stages - 1, c.num_stages + 1)]
    stages = [s for s in stages if 1 <= s.num_stages <= tuned.MOST_STAGES]
    warps = [n for n in (c.num_warps // 2, c.num_warps * 2) if n in (4, 8)]
    return [*blocks, *(c._replace(num_warps=n) for n in warps), *stages]


def _median(call: Callable[[], object]) -> float:
    from triton.testing import do_bench

    return do_bench(call, quantiles=[0.5])  # pyright: ignore[reportReturnType]


def _progress(calls: list) -> Iterable:
    try:
        from tqdm import tqdm
    except ImportError:
        return calls
    return tqdm(calls, desc="autotune", unit="kernel")
