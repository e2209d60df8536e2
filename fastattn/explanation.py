"""explain(): which backend serves a call, or each call that a module makes."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules
from torch.utils._pytree import tree_map

from fastattn import scores
from fastattn.backends import watch
from fastattn.backends.registry import Explanation
from fastattn.modules import KVCache
from fastattn.modules.multihead.interop import TORCH_ATTENTION

REPLACE = "torch's own class: fastattn.replace_attention(model) puts ours in its place"
OTHER = "a subclass of nn.MultiheadAttention, with a forward of its own"
NOT_CALLED = (
    "its forward was not called. At inference nn.TransformerEncoderLayer computes attention "
    "itself: fastattn.replace_attention(model) switches that off"
)


@dataclass(frozen=True)
class ModuleExplanation:
    """What computed the attention of a module; ``str()`` gives a table.

    Attributes:
        title: the class of the module.
        calls: (name of the submodule, :class:`fastattn.Explanation`) of each call that fastattn
            computed, in order. The module itself has the name ``""``.
        torch: by name, each nn.MultiheadAttention in the module that fastattn did not compute, and
            why it did not.
    """

    title: str
    calls: tuple[tuple[str, Explanation], ...]
    torch: dict[str, str]

    def __str__(self) -> str:
        here, there = len(self.calls), len(self.torch)
        lines = [f"{self.title}: {here} by fastattn, {there} by torch"]
        lines += [f"  {_shown(name)}  {_in_short(found)}" for name, found in self.calls]
        lines += [f"  {_shown(name)}  torch: {reason}" for name, reason in self.torch.items()]
        # Whoever has one call wants to know all, and whoever has eager ones, why.
        tables = [str(x) for _, x in self.calls if here == 1 or x.backend == "eager"]
        return "\n".join([*lines, *dict.fromkeys(tables)])


def _shown(name: str) -> str:
    return name or "(the module)"


def _in_short(found: Explanation) -> str:
    path = f" ({found.path})" if found.path else ""
    return f"{found.backend}{path}: {found.title}"


@overload
def explain(
    query: Tensor | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
    weight: Tensor | None = None,
    **options: Any,
) -> Explanation: ...
@overload
def explain(query: nn.Module, /, *inputs: Any, **options: Any) -> ModuleExplanation: ...
def explain(*inputs: Any, **options: Any) -> Explanation | ModuleExplanation:
    """Says which backend would serve a call and why the others would not.

    ``explain(module, ...)`` calls ``module(...)`` once and tells of each attention in it: who
    computed it, and what sent a call to torch's own code. The call is a real one, in the module's
    mode and the current grad mode. So dropout draws numbers, and buffers are updated. A
    :class:`fastattn.KVCache` among its arguments, or in a list or dict there, is copied first.

    Args:
        query: as in :func:`scaled_dot_product_attention`, or :func:`additive_attention` when weight
            is given, or :func:`attention` with ``score=`` or ``bandwidth=``. Without arguments, the
            call is a small float32 problem, on the GPU if there is one and else on the CPU. Or a
            module: any nn.Module, whole models too.
        *inputs: key, value and weight as there: key is query by default, and value is key. For a
            module, its arguments.
        **options: the call's other arguments.

    On a GPU, the self-check of the chosen backend runs first, as it would in the call.

    Returns:
        A :class:`fastattn.Explanation` with the ``backend``, the ``path`` through its kernels and
        the ``reasons`` against each backend. For a module, a
        :class:`fastattn.ModuleExplanation` with the explanations of its calls. ``print`` shows them
        as a table. For nested tensors without a jagged layout, which no function takes, the table
        says what to call instead.

    Raises:
        TypeError: as the function or module that is called.
        ValueError: as there; but a named backend that cannot do the problem is no error.

    Example:
        >>> q = torch.randn(1, 8, 128, 64).bfloat16()
        >>> print(fastattn.explain(q, q, q, is_causal=True))  # on some machine without a GPU
        dot attention: B=1 H=8 Hkv=8 M=128 N=128 D=64 E=64, bfloat16 on cpu, mask top_left
          cpu     chosen
          triton  no: tensors are on cpu; torch sees no CUDA device
          cuda    no: tensors are on cpu; torch sees no CUDA device
          eager   available
          cpu: instruction set avx512_bf16
          cpu: path tiles
        >>> layer, x = nn.TransformerEncoderLayer(64, 4), torch.randn(10, 2, 64)
        >>> print(fastattn.explain(layer, x))
        TransformerEncoderLayer: 0 by fastattn, 1 by torch
          self_attn  torch: torch's own class: fastattn.replace_attention(model) puts ours in its \
place
    """
    if inputs and isinstance(module := inputs[0], nn.Module):
        return _explain_module(getattr(module, "_orig_mod", module), inputs[1:], options)
    return scores.explain(*inputs, **options)


def _explain_module(module: nn.Module, inputs: tuple, options: dict) -> ModuleExplanation:
    memo: dict[int, Any] = {}  # one cache in several places stays one

    def own(x: Any) -> Any:
        return copy.deepcopy(x, memo) if isinstance(x, KVCache) else x

    inputs, options = tree_map(own, (inputs, options))
    with watch.watching() as notes, _uncompiled():
        record = _Record(module, notes)
        with record.of_modules():
            module(*inputs, **options)
    return ModuleExplanation(type(module).__name__, tuple(record.calls), record.refused)


class _Record:
    """Files notes under the modules that run, which global hooks tell; own hooks change paths.

    Global hooks hear of the modules of other threads too, which may be halfway through.
    """

    def __init__(self, module: nn.Module, notes: list[watch.Note]) -> None:
        self.names = {id(inner): name for name, inner in module.named_modules()}
        self.notes = notes
        self.calls: list[tuple[str, Explanation]] = []
        self.refused: dict[str, str] = {}
        waiting = (m for m in module.modules() if isinstance(m, TORCH_ATTENTION))
        self.not_called = {id(m) for m in waiting}
        self.running: list[str] = []  # names of modules
        self.noted: list[bool] = []  # for each that runs, whether anything was

    @contextlib.contextmanager
    def of_modules(self) -> Iterator[None]:
        enter = torch_modules.register_module_forward_pre_hook(self._enter)
        leave = torch_modules.register_module_forward_hook(self._leave, always_call=True)
        try:
            yield
        finally:
            enter.remove()
            leave.remove()
        self._file()
        self.refused |= {self.names[x]: NOT_CALLED for x in self.not_called}

    def _enter(self, module: nn.Module, _: Any) -> None:
        self.not_called.discard(id(module))
        if not watch.by_this_thread():
            return
        self._file()
        self.running.append(self.names.get(id(module), type(module).__name__))
        self.noted.append(False)

    def _leave(self, module: nn.Module, *_: Any) -> None:
        if not watch.by_this_thread():
            return
        self._file()
        name, noted = self.running.pop(), self.noted.pop()
        if isinstance(module, TORCH_ATTENTION) and not noted:
            self.refused[name] = REPLACE if type(module) is TORCH_ATTENTION else OTHER

    def _file(self) -> None:
        """Files the notes since the last time under the module that runs."""
        taken, name = self.notes.copy(), self.running[-1] if self.running else ""
        self.notes.clear()
        if taken and self.noted:
            self.noted[-1] = True
        self.calls += [(name, note) for note in taken if isinstance(note, Explanation)]
        self.refused.update((name, note) for note in taken if isinstance(note, str))


def _uncompiled() -> contextlib.AbstractContextManager:
    """Modules compiled by torch.compile run as they are written: compiled code makes no notes."""
    if "torch._dynamo" not in sys.modules:
        return contextlib.nullcontext()
    return torch.compiler.set_stance("force_eager")
