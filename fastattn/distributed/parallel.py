"""Modules on a mesh: heads on one of its dims, the sequence on another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fastattn.distributed import agree, heads
from fastattn.distributed.comm import Group
from fastattn.distributed.context import METHODS, Method
from fastattn.distributed.heads import move
from fastattn.distributed.layout import Layout
from fastattn.distributed.part import ALIKE, Masks, Part, Points, check_call, check_out_proj, summed
from fastattn.modules.multihead import inputs, interop, kv_cache, projection
from fastattn.modules.multihead.additive import MultiheadAdditiveAttention
from fastattn.modules.multihead.attention import MultiheadAttention
from fastattn.modules.multihead.kv_cache import KVCache
from fastattn.problem import arguments

Layouts = Layout | Callable[[int, int], Layout]
_OURS = (MultiheadAttention, MultiheadAdditiveAttention)


def parallelize(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    context: str | None = None,
    heads: str | None = None,
    layout: Layouts | None = None,
    method: Method | None = None,
) -> nn.Module:
    r"""Shares every multi-head attention of a model among the ranks of a mesh, in place.

    Outputs, weights, gradients and dropout's bits are those of one process. A call that cannot be
    computed so raises an error. :class:`fastattn.MultiheadAttention` and
    :class:`fastattn.MultiheadAdditiveAttention` are shared. All else in the model stays as it is,
    with one exception: nn.TransformerEncoder no longer makes nested tensors of padded batches at
    inference, as with ``enable_nested_tensor=False``.

    ``heads``: each rank of this mesh dim computes some heads, with its parts of the parameters.
    Inputs and outputs are whole, and the same on these ranks. Parameters become DTensors of
    nn.MultiheadAttention's names and shapes. So ``load_state_dict`` takes the plain state dict, and
    ``full_tensor()`` of what ``state_dict()`` holds gives it back.

    ``context``: each rank of this mesh dim has some rows of the sequence, in inputs and outputs.
    ``attn_mask`` has this rank's rows. Its keys, and those of ``key_padding_mask``, are all keys in
    the order of positions. Gradients of parameters are those of this rank's rows: their sum over
    the ranks is the gradient of the summed losses. DistributedDataParallel and fully_shard over
    this mesh dim make the mean.

    Call this before the optimizer is made, and before fully_shard or DistributedDataParallel. The
    latter takes no DTensors: with ``heads``, write fully_shard.

    Args:
        module: a model, or an attention module. Changed in place.
        mesh: a mesh with named dims, as ``init_device_mesh(..., mesh_dim_names=("dp", "tp"))``.
        context: the mesh dim that shares the sequence. Default None: each rank has all rows.
        heads: the mesh dim that shares heads; its size divides ``num_heads``. Default None: each
            rank has all heads.
        layout: which positions each rank holds: a :class:`Layout`, where every sequence has one
            length; or a function of (length, ranks), such as ``Layout.zigzag``. Default None: in
            the order of ranks. Without a :class:`Layout`, ranks tell each other their lengths, in
            each call, which waits for the device.
        method: of :func:`context_parallel_attention`. Default None: chosen as there.

    Returns:
        The module itself.

    Raises:
        TypeError: ``mesh`` is no DeviceMesh, or an argument is of the wrong type.
        ValueError: an unknown mesh dim, heads that do not divide, no attention to share, or a
            module that cannot be shared. A parameter that is tied to one outside of attention. From
            the module: lengths that do not fit the layout, or arguments that a shared module does
            not take.

    Source: heads: Shoeybi et al., "Megatron-LM", 2019, section 3. context: see
    :func:`context_parallel_attention`.

    Example:
        >>> mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("cp", "tp"))
        >>> model = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 8, batch_first=True), 6)
        >>> fastattn.replace_attention(model)
        >>> parallelize(model, mesh, context="cp", heads="tp", layout=Layout.zigzag)
    """
    arguments.check_choice("method", method, (None, *METHODS))
    shared = Shared(mesh, context, heads, layout, method)
    found = _attentions(module, context is not None)
    for x in found:
        _check_module(x, shared)
    if heads is not None:
        from fastattn.distributed import parameters  # imports DTensors, which takes a second

        parameters.cut(found, module, mesh[heads])
    for x in found:
        x.__dict__["_shared"] = shared
        interop.off_fast_path(x)
    for x in module.modules():
        if isinstance(x, nn.TransformerEncoder):
            x.use_nested_tensor = False  # ranks share padded batches
    return module


def _attentions(module: nn.Module, context: bool) -> list[MultiheadAttention]:
    """What is to be shared; raises for what would silently attend to a rank's own rows."""
    found = []
    for name, x in module.named_modules():
        where = f"{name or 'module'}: {type(x).__name__}"
        if isinstance(x, MultiheadAttention):
            found.append(x)
        elif isinstance(x, interop.TORCH_ATTENTION):
            raise ValueError(f"{where} is torch's: write fastattn.replace_attention(module) first")
        elif context and any(c.__module__.startswith("fastattn.modules.") for c in type(x).__mro__):
            raise ValueError(
                f"{where} cannot share a sequence: write context_parallel_attention in its place, "
                "or MultiheadAttention"
            )
    if not found:
        raise ValueError("module: expected a MultiheadAttention in it, got none")
    return found


def _check_module(module: MultiheadAttention, shared: Shared) -> None:
    if module.__dict__.get("_shared") is not None:
        raise ValueError("module: parallelize was called before: name both mesh dims in one call")
    if type(module) not in _OURS:
        raise ValueError(
            f"module: expected a MultiheadAttention or a MultiheadAdditiveAttention, got "
            f"{type(module).__name__}: remove parametrizations, call fully_shard afterwards, and "
            "write context_parallel_attention in the forward of a subclass"
        )
    if shared.context is not None and projection.extra_keys(module):
        raise ValueError(
            "module: add_bias_kv and add_zero_attn append keys, and a shared sequence has no place "
            "for them: write heads= alone"
        )
    ranks = 1 if shared.heads is None else shared.heads.size
    if module.num_heads % ranks:
        raise ValueError(
            f"heads: expected a mesh dim whose size divides {module.num_heads} heads, got {ranks}: "
            "write context="
        )
    if shared.heads is not None:
        check_out_proj(module)


class Shared:
    """How the ranks of a mesh share a module: what its forward becomes."""

    def __init__(
        self,
        mesh: Any,
        context: str | None,
        heads: str | None,
        layout: Layouts | None,
        method: Method | None,
    ) -> None:
        if not isinstance(mesh, DeviceMesh):
            raise TypeError(f"mesh: expected a DeviceMesh, got {type(mesh).__name__}")
        if context is None and heads is None:
            raise ValueError("context, heads: expected a mesh dim for one of them, or for both")
        if context == heads:
            raise ValueError(f"context, heads: expected two mesh dims, got {context!r} twice")
        if layout is not None and not isinstance(layout, Layout) and not callable(layout):
            raise TypeError(
                "layout: expected a Layout, or a function of (length, ranks), got "
                f"{type(layout).__name__}"
            )
        self.context, self.heads = _group(mesh, "context", context), _group(mesh, "heads", heads)
        self.layout = layout
        self.method: Method | None = method

    def __deepcopy__(self, _memo: dict) -> Shared:
        return self  # nothing in it changes, and process groups cannot be copied

    def __reduce__(self) -> NoReturn:
        raise TypeError("a shared module cannot be pickled: save module.state_dict() instead")

    @agree.whole
    def forward(
        self,
        module: MultiheadAttention,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        masks: Masks,
        hints: tuple[bool, bool, bool],
        cache: KVCache | None,
    ) -> tuple[Tensor, Tensor | None]:
        """What ``module`` returns, with this rank's rows and heads of the work."""
        need_weights, average, is_causal = hints
        part = Part(module, self)

        def given() -> tuple[Points, Masks]:
            inputs.check_tensors(query, key, value, *masks, cache)
            check_call(part, (query, key, value, *masks), cache)
            saved = inputs.that_autograd_saves(query, key, value)
            points = inputs.of_each(self._replicated, *saved)
            padding = self._replicated(masks[0])
            return points, (padding, self._own_heads(masks[1], module.num_heads))

        if self.context is not None:
            step = part.step_of_rows(given, need_weights, is_causal)
        elif cache is not None:
            points, own = given()
            step = kv_cache.step(cast(Any, part), cache, *points, own, need_weights)
        else:
            points, own = given()
            call = inputs.canonical(cast(Any, part), *points, *own, need_weights, is_causal)
            step = part.step(call)
        out, weights = part.attend_heads(step, need_weights, average)
        return out, self._all_heads(weights, average, module.num_heads)

    # ---- heads: whole on every rank, and back ----

    def _replicated(self, tensor: Any) -> Any:
        return tensor if self.heads is None else heads.replicated(tensor, self.heads)

    def _own_heads(self, attn_mask: Tensor | None, H: int) -> Tensor | None:
        """Of a mask (B * H, M, N), entries of this rank's heads; any other as it is."""
        whole = self._replicated(attn_mask)
        if self.heads is None or whole is None or whole.dim() != 3:
            return whole
        if whole.shape[0] % H:
            raise RuntimeError(
                f"attn_mask: expected (B * {H}, M, N) with {H} heads, got {list(whole.shape)}"
            )
        each = H // self.heads.size
        own = whole.unflatten(0, (-1, H)).narrow(1, self.heads.rank * each, each)
        return own.flatten(0, 1)

    def _all_heads(self, weights: Tensor | None, average: bool, H: int) -> Tensor | None:
        """The weights of all heads, or their mean."""
        group = self.heads
        if weights is None or group is None:
            return weights
        if average:
            return (summed(weights, group) / group.size).to(weights.dtype)
        layout, dim = Layout.contiguous(H, group.size), weights.dim() - 3
        return move(weights, *heads.whole_and_part(layout, dim, group))

    # ---- rows ----

    def layouts(self, own: Callable[[], list[int]]) -> tuple[Layout, Layout]:
        """Of the queries and of the keys.

        ``own``: how many of each this rank has, and what ``ALIKE`` names; or it raises.
        """
        group, fixed = cast(Group, self.context), isinstance(self.layout, Layout)
        # Who knows all lengths looks at all: a rank that raised alone would leave others waiting.
        known = slice(group.rank, group.rank + 1) if fixed else slice(None)
        of_rows, of_keys = agree.lengths(own, ALIKE, not fixed, group)
        made = self._made(of_rows, group), self._made(of_keys, group)
        for name, layout, has in zip(("query", "key"), made, (of_rows, of_keys), strict=True):
            if layout.ranks != group.size or list(layout.sizes[known]) != has[known]:
                where = f"on rank {group.rank}" if fixed else "on the ranks"
                raise ValueError(
                    f"{name}: got {has[known]} rows {where}, which are not those of layout, "
                    f"{layout.sizes}: one Layout serves one length; write layout=Layout.zigzag, "
                    "without a length, for others; in compiled calls that takes equal shares"
                )
        return made

    def _made(self, sizes: list[int], group: Group) -> Layout:
        if isinstance(self.layout, Layout):
            return self.layout
        if self.layout is None:
            return agree.in_order(sizes)
        made = self.layout(sum(sizes), group.size)
        if not isinstance(made, Layout):
            raise TypeError(
                "layout: expected a function of (length, ranks) that returns a Layout, got "
                f"{type(made).__name__} from it"
            )
        return made


def _group(mesh: DeviceMesh, argument: str, name: str | None) -> Group | None:
    names = mesh.mesh_dim_names or ()
    if name is None:
        return None
    if not isinstance(name, str):
        raise TypeError(f"{argument}: expected the name of a mesh dim, got {type(name).__name__}")
    if name not in names:
        hint = "" if names else ": write init_device_mesh(..., mesh_dim_names=...)"
        raise ValueError(f"{argument}: expected one of the mesh dims {names}, got {name!r}{hint}")
    return Group(mesh[name])
