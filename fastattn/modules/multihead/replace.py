"""Swaps the attention of an existing model for fastattn's, in place."""

import warnings

from torch import nn
from torch.nn.utils import parametrize

from fastattn.modules.multihead.attention import MultiheadAttention
from fastattn.modules.multihead.interop import TORCH_ATTENTION, off_fast_path


def replace_attention(model: nn.Module) -> int:
    """Make every nn.MultiheadAttention in ``model``, itself included, a fastattn one, in place.

    Each module stays the same object. Parameters (and optimizers that hold them), buffers, hooks,
    parametrizations, training mode, names and sharing do not change. Outputs change by rounding
    only.

    At inference nn.TransformerEncoderLayer would bypass its attention. So each module also gets a
    forward pre-hook that does nothing: its presence makes the layer call the module. Modules that
    already are of our class get only the hook. A second call changes nothing.

    Subclasses of nn.MultiheadAttention and modules with a patched ``forward`` are left alone, since
    they may compute something else. One warning names them.

    Args:
        model (nn.Module): any module, on any device, in any mode. Changed in place.

    Returns:
        int: the number of modules swapped.

    Raises:
        TypeError: ``model`` is no nn.Module.

    Warns:
        UserWarning: some attention modules were left alone.

    Note:
        ``torch.jit.script`` puts plain nn.MultiheadAttention modules into the model, since ours are
        not TorchScript. Call this function again to go on with the eager model.

    Example::

        >>> model = nn.Transformer(d_model=64, nhead=4)
        >>> fastattn.replace_attention(model)
        18
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected an nn.Module, got {type(model).__name__}")
    swapped = 0
    left_alone = []
    for name, module in model.named_modules():
        if isinstance(module, MultiheadAttention):
            off_fast_path(module)
        elif isinstance(module, TORCH_ATTENTION):
            if _is_exact(module):
                _swap_class(module)
                off_fast_path(module)
                swapped += 1
            else:
                left_alone.append(f"{name or '(the model)'}: {type(module).__name__}")
    if left_alone:
        warnings.warn(
            "replace_attention left these attention modules alone, because they are subclasses of "
            f"nn.MultiheadAttention or have a forward of their own: {', '.join(left_alone)}",
            stacklevel=2,
        )
    return swapped


def _is_exact(module: nn.MultiheadAttention) -> bool:
    """Whether ``module`` computes what nn.MultiheadAttention computes. It may be parametrized."""
    patched = "forward" in module.__dict__
    return not patched and parametrize.type_before_parametrizations(module) is TORCH_ATTENTION


def _swap_class(module: nn.MultiheadAttention) -> None:
    """Change the class of ``module`` rather than build another.

    Our class adds methods only, no state and no constructor. So every instance of its base is a
    valid instance of it. Identity, sharing, hooks, parameters and foreign attributes all stay.
    """
    if not parametrize.is_parametrized(module):
        module.__class__ = MultiheadAttention
        return
    # A parametrized module has a class made for it, which holds its properties. The only base of
    # that class is the class before parametrization. Deep copies share the made class, so the swap
    # makes a new one instead of changing its base.
    members = {k: v for k, v in vars(type(module)).items() if k not in ("__dict__", "__weakref__")}
    name = f"Parametrized{MultiheadAttention.__name__}"
    module.__class__ = type(name, (MultiheadAttention,), members)
