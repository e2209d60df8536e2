"""The implementations of a case: ours first, then all of PyTorch's, on the same inputs."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import fastattn
from bench import cases, machine, packages, packed
from bench.cases import FORWARD, Case
from fastattn import functional, testing
from fastattn.backends import registry
from fastattn.problem import Problem, record

OURS = "fastattn"
SDPA, MODULE, EAGER, COMPILED = "torch SDPA", "nn.MultiheadAttention", "eager", "torch.compile"
FLEX, CDIST = "FlexAttention", "torch.cdist"
# What torch's SDPA may choose among on a GPU; each is forced, so that its best is never missed.
SDPA_BACKENDS = {
    "SDPA flash": SDPBackend.FLASH_ATTENTION,
    "SDPA efficient": SDPBackend.EFFICIENT_ATTENTION,
    "SDPA cuDNN": SDPBackend.CUDNN_ATTENTION,
    "SDPA math": SDPBackend.MATH,
}
# Ours without what the case is about: shown beside it, and no peer.
WITHOUT = "ours without it"
PLAIN = (EAGER, MODULE)  # the starting points of torch.compile, always shown beside it
NEED_COMPILER = {COMPILED, FLEX}


@dataclass
class Implementation:
    """``call()`` returns the output, or (output, weights or None), as a function of ``leaves``."""

    call: Callable[[], Tensor | tuple]
    leaves: dict[str, Tensor]
    module: nn.Module | None = None
    padding: packed.Padding | None = None  # of leaves and output, if theirs is another shape

    def step(self, direction: str, upstream: Tensor) -> Callable[[], object]:
        """The timed call: inference without autograd, or a training step without the optimiser."""
        if self.module is not None:
            self.module.train(direction != FORWARD)
        if direction == FORWARD:
            return torch.no_grad()(self.call)
        leaves = list(self.leaves.values())
        upstream = self.padding.pad(upstream) if self.padding else upstream
        return lambda: torch.autograd.grad(_outputs(self.call())[0], leaves, upstream)

    def results(self, direction: str, upstream: Tensor) -> dict[str, Tensor]:
        """The outputs of a step by name, with the gradients as ``grad_<leaf>``."""
        if direction == FORWARD:
            outputs, grads = self.step(direction, upstream)(), {}
        else:
            self.step(direction, upstream)  # for its effect: training mode
            outputs, leaves = self.call(), list(self.leaves.values())
            upstream = self.padding.pad(upstream) if self.padding else upstream
            pulled = torch.autograd.grad(_outputs(outputs)[0], leaves, upstream)
            grads = {f"grad_{name}": g for name, g in zip(self.leaves, pulled, strict=True)}
        named = zip(("out", "weights"), _outputs(outputs), strict=False)
        found = {name: x.detach() for name, x in named} | grads
        return {n: self.padding.pack(x) for n, x in found.items()} if self.padding else found


def _outputs(returned: Tensor | tuple) -> list[Tensor]:
    returned = returned if isinstance(returned, tuple) else (returned,)
    return [x for x in returned if x is not None]


@dataclass
class Workload:
    """A case with its inputs and all its implementations, ours first."""

    case: Case
    t: testing.Tensors
    upstream: Tensor
    backend: str
    implementations: dict[str, Implementation]

    def step(self, name: str, direction: str) -> Callable[[], object]:
        """The call of one implementation, ready to be timed."""
        return self.implementations[name].step(direction, self.upstream)


def build(
    case: Case, device: str = "cpu", backend: str = "auto", compiled: bool = True
) -> Workload:
    """Draws the inputs of a case and sets up ours and its peers; compiles nothing yet."""
    t = cases.draw(case, device)
    p = cases.problem(case, t)
    chosen = registry.select(p, backend)
    if registry.takes(p, grad=True):
        chosen = registry.faster_forward(p, backend, chosen, t.bias is not None) or chosen
    upstream = t.grad_out.transpose(1, 2).flatten(2) if case.module else t.grad_out
    set_up = _modules if case.module else _functions
    implementations = set_up(case, t, backend, compiled and case.compiled)
    return Workload(case, t, upstream, chosen, implementations)


# ---- functions of q, k, v ----


def _functions(
    case: Case, t: testing.Tensors, backend: str, compiled: bool
) -> dict[str, Implementation]:
    tensors = {n: getattr(t, n) for n in testing.INPUTS}
    if not case.problem.bias_grad:
        del tensors["bias"]
    leaves = {n: x.detach().requires_grad_() for n, x in tensors.items() if x is not None}
    set_up = {"dot": _dot, "additive": _additive, "gaussian": _gaussian}[case.problem.score]
    calls = set_up(case, t, leaves, backend, compiled)
    found = {name: Implementation(call, leaves) for name, call in calls.items()}
    if t.sink is not None and WITHOUT in found:
        found[WITHOUT].leaves = {n: x for n, x in leaves.items() if n != "sink"}
    return found | (_padded_batch(case, leaves) if case.keys == "packed" else {})


def _padded_batch(case: Case, leaves: dict[str, Tensor]) -> dict[str, Implementation]:
    documents = packed.lengths(case.problem.N, case.mean)
    padding = packed.padding(documents, leaves["q"].device)
    padded = {n: padding.pad(x.detach()).requires_grad_() for n, x in leaves.items()}
    call = packed.attend_padded(list(padded.values()))
    return {packed.PADDED: Implementation(call, padded, padding=padding)}


def _dot(
    case: Case, t: testing.Tensors, leaves: dict[str, Tensor], backend: str, compiled: bool
) -> dict[str, Callable]:
    p = cases.problem(case, t)
    qkv, bias, scale = [leaves[n] for n in "qkv"], leaves.get("bias", t.bias), 1 / math.sqrt(p.D)
    causal = t.mask.causal == "top_left"
    # A mask that torch can only take as a tensor is built here, outside the timing.
    huge = case.keys == "packed" and p.M * p.N > packed.MOST_MASKED
    kept = p.kept() if record.kinds(t.mask) and not huge else None
    dropped = None if kept is None else ~kept
    as_keep = t.mask.keep is not None  # then all implementations get the same tensor
    ours = dict(attn_mask=t.mask.keep, is_causal=causal) if as_keep else dict(mask=t.mask)
    added, grouped = _matrix(case, bias, kept), p.H != p.Hkv
    extras = dict(softcap=p.softcap or None, sink=leaves.get("sink"))

    def call_ours(**extras) -> Tensor:
        return functional.scaled_dot_product_attention(
            *qkv, bias=testing.given_bias(case.problem, bias), enable_gqa=grouped,
            backend=backend, **ours, **extras,
        )  # fmt: skip

    def sdpa() -> Tensor:
        return F.scaled_dot_product_attention(
            *qkv, attn_mask=added() if bias is not None or not causal else None,
            is_causal=causal and bias is None, enable_gqa=grouped,
        )  # fmt: skip

    calls: dict[str, Callable] = {OURS: lambda: call_ours(**extras)}
    if any(x is not None for x in extras.values()):  # which torch's function has not
        calls[WITHOUT] = call_ours
    else:
        calls |= _sdpa(p.device.type, packed.too_large(p.M, p.N) if huge else sdpa)
    if case.keys == "packed":
        documents = packed.lengths(p.N, case.mean)
        calls[packed.LOOP] = lambda: packed.one_by_one(documents, qkv)
    if case.others:
        calls |= packages.calls(case, t, qkv)
    if case.compiled:
        calls[EAGER] = lambda: eager_dot(*qkv, scale, dropped, bias, **extras)
    if compiled:
        fused = torch.compile(eager_dot, dynamic=False)
        calls[COMPILED] = lambda: fused(*qkv, scale, dropped, bias, **extras)
    if compiled and t.sink is None:
        calls[FLEX] = _flex(p, t, leaves)
    return calls


def _matrix(case: Case, bias: Tensor | None, kept: Tensor | None) -> Callable[[], Tensor | None]:
    """What is added to the scores where a function takes one tensor.

    A bias without a gradient is made here, outside the timing.
    """
    given = testing.given_bias(case.problem, bias)
    if given is None:
        return lambda: kept

    def make() -> Tensor:
        matrix = given if given is bias else given.to_dense(case.problem.M, case.problem.N)
        return matrix if kept is None else matrix.masked_fill(~kept, -math.inf)

    made = None if case.problem.bias_grad else make()
    return make if made is None else lambda: made


def _sdpa(device: str, call: Callable[[], Tensor]) -> dict[str, Callable]:
    if device != "cuda":
        return {SDPA: call}

    def force(backend: SDPBackend) -> Callable:
        def forced() -> Tensor:
            with sdpa_kernel(backend):
                return call()

        return forced

    return {name: force(backend) for name, backend in SDPA_BACKENDS.items()}


def _flex(p: Problem, t: testing.Tensors, leaves: dict[str, Tensor]) -> Callable[[], Tensor]:
    """FlexAttention; its block mask is made here, outside the timing.

    On a CPU it refuses tensors that want a gradient.
    """
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    on_cpu, mask = p.device.type == "cpu", t.mask
    given = {n: x.detach() if on_cpu else x for n, x in leaves.items()}
    bias = given.get("bias")

    def at(x: Tensor, b, h, i, j):
        """x[b, h, i, j], where x may broadcast."""
        return x[tuple(n if size > 1 else 0 for n, size in zip((b, h, i, j), x.shape, strict=True))]

    def keep(b, h, i, j):
        kept = j <= i if mask.causal else j >= 0
        if mask.kv_len is not None:
            kept = kept & (j < mask.kv_len[b])
        return kept if mask.keep is None else kept & at(mask.keep, b, h, i, j)

    blocks = None
    if record.kinds(mask):
        dense = mask.keep if mask.keep is not None else p.kept()
        B, H = (n if n > 1 else None for n in dense.shape[:2])
        blocks = create_block_mask(keep, B, H, p.M, p.N, device=str(p.device))
    fused = torch.compile(flex_attention, dynamic=False)

    def score(s, b, h, i, j):
        capped = p.softcap * torch.tanh(s / p.softcap) if p.softcap else s
        return capped if bias is None else capped + at(bias, b, h, i, j)

    plain = bias is None and not p.softcap
    options = dict(score_mod=None if plain else score, block_mask=blocks, enable_gqa=p.H != p.Hkv)

    def call() -> Tensor:
        if on_cpu and torch.is_grad_enabled():
            raise NotImplementedError("FlexAttention has no gradients on a CPU")
        return fused(*(given[n] for n in "qkv"), **options)

    return call


def _additive(
    case: Case, t: testing.Tensors, leaves: dict[str, Tensor], backend: str, compiled: bool
) -> dict[str, Callable]:
    args = [leaves[n] for n in "qkvw"]
    calls = {
        OURS: lambda: functional.additive_attention(*args, mask=t.mask, backend=backend),
        EAGER: lambda: eager_additive(*args),
    }
    if compiled:
        fused = torch.compile(eager_additive, dynamic=False)
        calls[COMPILED] = lambda: fused(*args)
    return calls


def _gaussian(
    case: Case, t: testing.Tensors, leaves: dict[str, Tensor], backend: str, compiled: bool
) -> dict[str, Callable]:
    q, k, v, bandwidth = args = [leaves[n] for n in ("q", "k", "v", "bandwidth")]
    options = dict(score="gaussian", bandwidth=bandwidth, mask=t.mask, backend=backend)
    calls = {
        OURS: lambda: fastattn.attention(q, k, v, **options),  # pyright: ignore[reportArgumentType]
        CDIST: lambda: by_distance(*args),
        EAGER: lambda: eager_gaussian(*args),
    }
    if compiled:
        fused = torch.compile(eager_gaussian, dynamic=False)
        calls[COMPILED] = lambda: fused(*args)
    return calls


def eager_dot(
    q: Tensor, k: Tensor, v: Tensor, scale: float, dropped: Tensor | None, bias: Tensor | None,
    softcap: float | None = None, sink: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention without a fused function."""
    scores = q @ k.mT * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    if dropped is not None:
        scores = scores.masked_fill(dropped, -math.inf)
    if sink is None:
        return torch.softmax(scores, -1) @ v
    column = sink[:, None, None] if sink.dim() == 1 else sink  # of heads, or of rows
    column = column.to(scores.dtype).expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat([scores, column], -1), -1)[..., :-1] @ v


def eager_additive(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """Textbook additive attention with one head, whose dim is squeezed away."""
    q, k, w = q[:, 0], k[:, 0], w[0]
    scores = torch.tanh(q[:, :, None] + k[:, None]) @ w  # [B, M, N] from [B, M, N, D]
    return (torch.softmax(scores, -1) @ v[:, 0])[:, None]


def eager_gaussian(q: Tensor, k: Tensor, v: Tensor, bandwidth: Tensor) -> Tensor:
    """Kernel regression of every difference, [B, H, M, N, D]."""
    between = (q[:, :, :, None] - k[:, :, None]) / bandwidth.unsqueeze(-2)
    return torch.softmax(between.square().sum(-1) * -0.5, -1) @ v


def by_distance(q: Tensor, k: Tensor, v: Tensor, bandwidth: Tensor) -> Tensor:
    """Kernel regression as it is written today: short, in B H M N memory, for one bandwidth."""
    return torch.softmax(torch.cdist(q, k).square() / (-2 * bandwidth.square()), -1) @ v


# ---- modules ----


def _modules(
    case: Case, t: testing.Tensors, backend: str, compiled: bool
) -> dict[str, Implementation]:
    p = case.problem
    x = t.q.transpose(1, 2).flatten(2).detach().requires_grad_()  # [B, M, d_model]
    torch.manual_seed(0)
    sizes = dict(dropout=p.dropout_p, batch_first=True, device=x.device, dtype=x.dtype)
    theirs = nn.MultiheadAttention(p.H * p.D, p.H, **sizes)
    ours = fastattn.MultiheadAttention(p.H * p.D, p.H, **sizes)
    ours.load_state_dict(theirs.state_dict())
    if backend != "auto":  # the module has no such option: it uses the best backend
        ours._attend = functools.partial(_attend_heads, backend)
    modules = {OURS: ours, MODULE: theirs}
    if compiled:
        modules[COMPILED] = torch.compile(theirs, dynamic=False)
    implementations = {n: _module(module, x, case.need_weights) for n, module in modules.items()}
    _within_memory(case, implementations[MODULE], x)
    return implementations


def _within_memory(case: Case, theirs: Implementation, x: Tensor) -> None:
    """Raises if torch's scores and weights would not fit: else the process would be killed."""
    p = case.problem
    needed, free = 2 * p.B * p.H * p.M * p.N * x.element_size(), machine.free_bytes()
    if x.device.type != "cpu" or needed < 0.8 * free:
        return

    def refuse():
        raise MemoryError(f"its scores take {needed / 2**30:.0f} GiB, {free / 2**30:.0f} are free")

    theirs.call = refuse


def first_entries(work: Workload, count: int) -> Workload:
    """The workload of a module on the first entries of its batch."""
    if count >= work.case.problem.B:
        return work
    parts = {}
    for name, whole in work.implementations.items():
        x = whole.leaves["x"].detach()[:count].requires_grad_()
        parts[name] = _module(whole.module, x, work.case.need_weights)
    return dataclasses.replace(work, upstream=work.upstream[:count], implementations=parts)


def _attend_heads(backend: str, q: Tensor, k: Tensor, v: Tensor, **options):
    return functional.scaled_dot_product_attention(q, k, v, backend=backend, **options)


def _module(module, x: Tensor, need_weights: bool) -> Implementation:
    leaves = {"x": x, **{n.removeprefix("_orig_mod."): p for n, p in module.named_parameters()}}
    return Implementation(lambda: module(x, x, x, need_weights=need_weights), leaves, module)


def module_in(work: Workload, dtype: torch.dtype) -> Implementation:
    """A case's module in plain PyTorch: torch's; with dropout ours, for the same random bits."""
    dropout = work.case.problem.dropout_p > 0
    model = work.implementations[OURS if dropout else MODULE]
    module = copy.deepcopy(model.module).to(dtype)
    if dropout:
        module._attend = functools.partial(_attend_heads, "eager")
    x = model.leaves["x"].detach().to(dtype).requires_grad_()
    return _module(module, x, work.case.need_weights)
