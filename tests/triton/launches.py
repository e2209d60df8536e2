"""What the Triton backend launches on a GPU that is none: the ordinary way, and from plans.

    python tests/triton/launches.py 4    one in 4 cases of the grid, some of its tensors moved in
                                         memory, given twice or cut: where the two ways differ

Prints JSON. bench/stand_in.py takes the driver's place, so tensors' data does not matter.
"""

import json
import sys
from pathlib import Path

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from bench import stand_in
from fastattn import testing
from fastattn.backends import triton as backend
from fastattn.problem import validate
from fastattn.problem.schemas import Call

# ---- operands of the operators ----


def operands(case) -> tuple[tuple, tuple]:
    """The arguments of the forward and of the backward operator for a case of the grid."""
    t = testing.make(case)
    p, *tensors = validate.build(
        case.score, t.q, t.k, t.v, t.w, mask=t.mask, bias=testing.given_bias(case, t.bias),
        enable_gqa=True, dropout_p=case.dropout_p, seed=1, return_weights=case.weights,
    )[:6]  # fmt: skip
    both = (*tensors, *p.operands)
    forward = (*both, t.sink)
    out, lse, _, stats = backend.launch_forward(*forward)
    biased = t.bias is not None and case.bias_grad
    grads = t.grad_out, lse if case.lse else None, t.grad_weights
    return forward, (*both, out, stats, *grads, biased, t.sink)


def moved(args: tuple, place: int, elements: int) -> tuple:
    """The same with one tensor some elements further in its memory."""
    x = args[place]
    if x is None or x.numel() == 0:
        return args
    extent = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    y = x.new_empty(extent + elements).as_strided(x.shape, x.stride(), elements)
    return (*args[:place], y, *args[place + 1 :])


def twice(args: tuple) -> tuple:
    """The same with q as key and value too, where that is such a problem."""
    q, k, v = args[:3]
    alike = q.shape == k.shape == v.shape and q.stride() == k.stride() == v.stride()
    return (q, q, q, *args[3:]) if alike else args


def first_sample(args: tuple) -> tuple:
    """The same of one sample, with the strides of all."""

    def cut(n: int, x):
        whole = not isinstance(x, torch.Tensor) or x.dim() < 2 or (n == W and x.dim() == 2)
        return x if whole else x[:1]

    return tuple(cut(n, x) for n, x in enumerate(args))


def wide_rows(args: tuple) -> tuple:
    """The same with other strides of q."""
    q = args[0]
    return (q.new_empty(*q.shape[:-1], q.shape[-1] + 16)[..., : q.shape[-1]], *args[1:])


def rescaled(args: tuple) -> tuple:
    """The same with another scale."""
    return (*args[:SCALE], args[SCALE] * 1.5, *args[SCALE + 1 :])


W, BIAS, KEEP, SCALE = map(Call._fields.index, ("w", "bias", "keep", "scale"))
SINK = len(Call._fields)  # of the forward operator alone
VARIANTS = {
    "one tensor": twice,  # first: its plan must suit others
    "": lambda args: args,
    "q moved": lambda args: moved(args, 0, 1),
    "v moved by 16 bytes": lambda args: moved(args, 2, 8),
    "bias moved": lambda args: moved(args, BIAS, 2),
    "mask moved": lambda args: moved(args, KEEP, 1),
    "sink moved": lambda args: moved(args, SINK, 1),
    "first sample": first_sample,
    "wide rows": wide_rows,
    "rescaled": rescaled,
}


# ---- what happens ----


class Ledger(TorchDispatchMode):
    """Notes launches, and operators that compute. All memory stays, so that addresses are names."""

    latest: "Ledger"

    def __init__(self):
        super().__init__()
        self.made, self.events = [], []
        Ledger.latest = self

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        self.made.append(made)
        allocates = "empty" in function.__name__
        if function._schema.is_mutable or not (allocates or function.is_view):
            given = [*args, *(kwargs or {}).values()]
            self.events.append((str(function), [self.described(x) for x in given]))
        return made

    def described(self, x):
        """A tensor by its memory and layout."""
        if not isinstance(x, torch.Tensor):
            return repr(x)
        return ("at", x.data_ptr(), tuple(x.shape), x.stride(), str(x.dtype))

    def named(self, given: tuple, results: tuple) -> tuple[list, dict[int, int]]:
        """(events and results, new addresses by their names in order of use).

        Names take the place of addresses, but for those in memory that was given.
        """
        made = (memory(x) for x in pytree.tree_leaves(self.made))
        old = {memory(x)[0] for x in given if isinstance(x, torch.Tensor)}
        new = {start: size for start, size in made if size and start not in old}
        names: dict[int, int] = {}

        def name(x):
            if isinstance(x, (tuple, list)):
                if len(x) > 1 and x[0] == "at":
                    return [address(x[1]), *map(name, x[2:])]
                return [name(y) for y in x]
            return x

        def address(at):
            if any(start <= at < start + size for start, size in new.items()):
                return f"new {names.setdefault(at, len(names))}"
            return at

        told = [name(e) for e in (*self.events, *map(self.described, results))]
        self.new = new
        return told, {n: at for at, n in names.items()}

    def around(self, at: int) -> tuple[int, int]:
        """(begin, end) of the new memory that an address is in."""
        return next((x, x + size) for x, size in self.new.items() if x <= at < x + size)


def memory(x) -> tuple[int, int]:
    """(address, bytes) of a tensor's memory."""
    storage = x.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def leaves(values, kinds):
    """Pairs of nested arguments and their types, without the constants."""
    for value, kind in zip(values, kinds, strict=True):
        if isinstance(kind, tuple):
            yield from leaves(value, kind)
        elif kind != "constexpr":
            yield value, kind


def watch_launches(active) -> None:
    """Makes each launch an event of the latest ledger, with the arguments that the kernel gets."""

    def launch(*given):
        *about, _annotations, _signature, args = given
        kinds = tuple(stand_in.KERNELS[about[4]].src.signature.values())
        if isinstance(args, list):  # flat, as plans have them
            kinds = [kind for _, kind in leaves(kinds, kinds)]
        taken = []
        for x, kind in leaves(args, kinds):
            value = x.data_ptr() if isinstance(x, torch.Tensor) else getattr(x, "value", x)
            taken.append(("at", value) if kind.startswith("*") else repr(value))
        Ledger.latest.events.append((repr(about[:8]), taken))

    active.utils.launch = launch
    Ledger()


def happens(call, args: tuple) -> tuple[list, dict[int, int], Ledger]:
    """What a call does, and its results."""
    ledger = Ledger()
    with ledger, torch.no_grad():
        results = call(*args)
    return *ledger.named(args, results), ledger


def differences(case, change) -> list:
    """What plans do otherwise than the ordinary way, forward and backward."""
    found = []
    for args, (ordinary, planned) in zip(map(change, operands(case)), WAYS, strict=True):
        told, names, ledger = happens(ordinary, args)
        told_of_plan, names_of_plan, ledger_of_plan = happens(planned, args)
        if told != told_of_plan:
            found.append([str(told)[:2000], str(told_of_plan)[:2000]])
            continue
        # Memory that kernels alone see may be one allocation. Its parts are as large, and apart.
        parts = set()
        for n, at in names.items():
            begin, end = ledger.around(at)
            parts.add((names_of_plan[n] - (at - begin), end - begin))
        ends = [0, *(at + size for at, size in sorted(parts))]
        for (at, size), before in zip(sorted(parts), ends, strict=False):
            begin, end = ledger_of_plan.around(at)
            if not max(begin, before) <= at <= at + size <= end:
                found.append(f"{size} bytes at {at} overlap others, or end behind {end}")
    return found


# ---- what is printed ----


def same(step: int) -> dict:
    """Calls from plans that differ from the ordinary way, and descriptions without a plan."""
    from fastattn.kernels.host import prepared

    prepared.MOST = 10**6
    watch_launches(stand_in.install())
    calls = []
    for case in testing.GRID[::step]:
        for variant, change in VARIANTS.items():
            for _ in range(2):
                forward, backward = map(change, operands(case))
                with torch.no_grad():
                    backend._forward(*forward)
                    backend._backward(*backward)
            calls.append((f"{case} {variant}", case, change))
    found: dict = {"calls": len(calls), "plans": 0, "without": 0, "different": []}
    found["plans"] = sum(type(x) is prepared.Plan for x in prepared._known.values())
    found["without"] = len(prepared._known) - found["plans"]
    for name, case, change in calls:
        found["different"] += [(name, x) for x in differences(case, change)]
    return found


WAYS = (
    (backend.launch_forward, backend._forward),
    (backend.launch_backward, backend._backward),
)

if __name__ == "__main__":
    print(json.dumps(same(int(sys.argv[1]))))
