"""Parameters of multi-head attention on the ranks that share its heads, as DTensors.

    in_proj_weight [3 E, E]      Shard(1)     rows of own heads come by an all-to-all in each call
    in_proj_bias [3 E]           Replicate()  cut in each call
    {q,k,v}_proj_weight [E, ...] Shard(0)
    bias_{k,v} [1, 1, E]         Shard(2)
    score_weight [H, D]          Shard(0)
    out_proj.weight [E, E]       Shard(1)     out_proj.bias: Replicate()

One rank's heads have rows in three places of ``in_proj_weight``: of queries, keys and values. No
placement of torch can say that, so columns are kept, and rows are exchanged: ``3 E^2 / ranks``
numbers a call. For that price names and shapes are those of nn.MultiheadAttention. Checkpoints,
optimizers and fully_shard understand these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fastattn.distributed import comm, heads
from fastattn.distributed.comm import Group
from fastattn.distributed.heads import move

PLACEMENTS: dict[str, Any] = {
    "in_proj_weight": Shard(1), "in_proj_bias": Replicate(), "q_proj_weight": Shard(0),
    "k_proj_weight": Shard(0), "v_proj_weight": Shard(0), "bias_k": Shard(2), "bias_v": Shard(2),
    "score_weight": Shard(0), "out_proj.weight": Shard(1), "out_proj.bias": Replicate(),
}  # fmt: skip
Places = dict[tuple[nn.Module, str], Any]  # who has a parameter, its name there: its placement


def cut(modules: Sequence[nn.MultiheadAttention], model: nn.Module, mesh: Any) -> None:
    """Makes the parameters DTensors on a 1-D mesh, whose first rank has the values.

    Parameters that are tied stay so. What cannot be cut raises before anything is.
    """
    places = {place: x for module in modules for place, x in _places(module).items()}
    found = {place: place[0]._parameters[place[1]] for place in places}
    _check_ties(model, places, found)
    made: dict[Tensor, nn.Parameter] = {}
    for (owner, last), whole in found.items():
        if whole is None:
            continue
        if whole not in made:
            shared = distribute_tensor(whole.detach(), mesh, [places[owner, last]])
            made[whole] = nn.Parameter(shared, whole.requires_grad)
        owner.register_parameter(last, made[whole])
    for module in modules:
        module.register_load_state_dict_pre_hook(_share_plain)


def _places(module: nn.MultiheadAttention) -> Places:
    made = {}
    for name, placement in PLACEMENTS.items():
        path, _, last = name.rpartition(".")
        owner = module.get_submodule(path)
        if last in owner._parameters:
            made[owner, last] = placement
        elif getattr(owner, last, None) is not None:
            raise ValueError(
                f"{name}: expected a parameter, got a tensor that pruning or the like makes anew "
                "in each call: write torch.nn.utils.prune.remove(module, name) first"
            )
    return made


def _check_ties(model: nn.Module, places: Places, found: dict) -> None:
    """Raises for a parameter that is also where another placement is wanted, or none."""
    wanted = {x: places[place] for place, x in found.items() if x is not None}
    for path, owner in model.named_modules():
        for last, x in owner._parameters.items():
            if x is not None and x in wanted and wanted[x] != places.get((owner, last)):
                name = f"{path}.{last}".removeprefix(".")
                raise ValueError(
                    f"{name}: is tied to a parameter of attention, of which each rank gets "
                    "another part: write context= alone, or untie them"
                )


def _share_plain(module: nn.Module, state: dict, prefix: str, *_rest: Any) -> None:
    """Before loading: whole tensors of a plain state dict get the placements of the parameters."""
    for name in PLACEMENTS:
        path, _, last = name.rpartition(".")
        held, given = module.get_submodule(path)._parameters.get(last), state.get(prefix + name)
        if not isinstance(held, DTensor) or not isinstance(given, Tensor):
            continue
        if not isinstance(given, DTensor) and given.shape == held.shape:
            device = held.device_mesh.device_type if held.is_meta else held.device
            state[prefix + name] = distribute_tensor(
                given.to(device), held.device_mesh, held.placements, src_data_rank=None
            )


def own(module: nn.MultiheadAttention, group: Group) -> dict[str, Any]:
    """What this rank's heads need of the parameters, as plain tensors; with gradients.

    Raises:
        TypeError: a parameter is a plain tensor, which may be whole or a part.
    """
    found: dict[str, Any] = dict.fromkeys(PLACEMENTS)
    for name in PLACEMENTS:
        path, _, last = name.rpartition(".")
        held = module.get_submodule(path)._parameters.get(last)
        if held is None:
            continue
        if not isinstance(held, DTensor):
            raise TypeError(
                f"{name}: expected a DTensor where ranks share heads, got {type(held).__name__}: "
                f"write distribute_tensor(x, mesh, [{PLACEMENTS[name]}])"
            )
        x: Any = held.to_local()
        if name == "in_proj_weight":
            x = _rows_of_heads(x, group)
        if name == "in_proj_bias":
            x = heads.replicated(x, group).view(3, group.size, -1)[:, group.rank].flatten()
        found[name] = x
    return found


def _rows_of_heads(x: Tensor, group: Group) -> Any:
    """From columns [3 E, E / ranks] to the rows [3 E / ranks, E] of this rank's heads."""
    return move(x, lambda x: _to_rows(x, group), lambda x: _to_columns(x, group))


def _to_rows(x: Tensor, group: Group) -> Tensor:
    by_rank = x.view(3, group.size, -1, x.shape[1]).unbind(1)
    shape = (3, by_rank[0].shape[1], x.shape[1])
    return torch.cat(comm.exchange(by_rank, [shape] * group.size, group), 2).flatten(0, 1)


def _to_columns(x: Tensor, group: Group) -> Tensor:
    by_rank = x.view(3, x.shape[0] // 3, x.shape[1]).chunk(group.size, 2)
    shape = by_rank[0].shape
    return torch.stack(comm.exchange(by_rank, [shape] * group.size, group), 1).flatten(0, 2)
