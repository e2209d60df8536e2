"""What makes and unmakes plans of launches, on a GPU that is none.

python tests/triton/plans.py    every function of RULES, by name: what it returns, as JSON
"""

import json
import sys
import threading
import weakref
from pathlib import Path

import torch
import triton
from triton.backends.nvidia import driver as nvidia

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from bench import stand_in
from fastattn.backends import triton as backend
from fastattn.kernels.host import prepared, together, tuned
from fastattn.kernels.tile.launching import watching
from fastattn.problem.record import WEIGHTS
from fastattn.problem.schemas import Call

ACTIVE = stand_in.install()
LAUNCH = ACTIVE.utils.launch
launched: list[tuple] = []


def note(*given):
    """Notes Triton's arguments, of which (.., stream, function, .., metadata, ..) have places."""
    launched.append(given)
    LAUNCH(*given)


STREAM, FUNCTION, METADATA = 3, 4, 7


def operands(N=32, dtype=torch.bfloat16) -> tuple:
    """Of the forward operator, for a plain problem."""
    q, k, v = (torch.zeros(1, 2, n, 64, dtype=dtype) for n in (32, N, N))
    return tuple(Call(q, k, v, scale=0.125))


def call(args: tuple, times: int = 1) -> tuple:
    """Calls, and gives the arguments of the last launch."""
    for _ in range(times):
        backend.run(backend.launch_forward, args)
    return launched[-1]


def a_plan_comes_with_the_second_call() -> list:
    args, states = operands(), []
    for _ in range(3):
        call(args)
        states += [type(x).__name__ for x in prepared._known.values()]
    return states


def a_call_that_compiles_is_watched_again() -> list:
    args, states = operands(N=48), []
    description = None
    for n in range(4):
        if n == 1:  # as where only the first call's kernels were there
            for kernel in together._kernels():
                kernel.device_caches.clear()
        call(args)
        description = description or next(reversed(prepared._known))
        states.append(type(prepared._known[description]).__name__)
    return states


def hooks_see_repeated_launches() -> list:
    hook, seen, args = triton.knobs.runtime.launch_enter_hook, [], operands()

    def enter(metadata):
        seen.append(metadata.get()["name"])

    call(args, 3)
    hook.add(enter)
    call(args, 2)
    hook.remove(enter)
    call(args, 2)
    return seen


def a_configuration_on_trial_runs() -> list:
    args, warps = operands(), []
    name = tuned.name("fwd", torch.bfloat16, 64, 64, "plain")
    warps.append(call(args, 3)[METADATA][0])
    with tuned.trial(name, (64, 64, 4, 2)):
        warps.append(call(args, 3)[METADATA][0])
    return [*warps, call(args, 3)[METADATA][0]]


def another_precision_takes_another_kernel() -> list:
    args, setting = operands(dtype=torch.float32), torch.backends.cuda.matmul
    kernels = []
    for setting.fp32_precision in ("ieee", "tf32", "ieee"):
        kernels.append(call(args, 3)[FUNCTION])
    return [kernels.index(x) for x in kernels]


def launches_go_to_the_current_stream() -> list:
    args, streams, get = operands(), [], ACTIVE.get_current_stream
    for stream in (0, 7, 9):
        ACTIVE.get_current_stream = lambda device, stream=stream: stream
        streams.append(call(args, 3)[STREAM])
    ACTIVE.get_current_stream = get
    return streams


def threads_launch_their_own_tensors() -> list:
    call(operands(), 2)
    launched.clear()
    own = {}

    def work():
        args = operands()
        own[args[0].data_ptr()] = args[1].data_ptr()
        held.append(args)
        for _ in range(200):
            call(args)

    held: list = []
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    q, k = 0, 4  # places among a plain kernel's flat arguments
    return [len(own), len(launched), all(own[x[-1][q]] == x[-1][k] for x in launched)]


def no_tensor_outlives_its_call() -> int:
    args = operands()
    no_rows = Call(args[0][:, :, :0], *args[1:3], weights=WEIGHTS["mean"])  # an operator, no kernel
    calls = args, tuple(no_rows)
    results = [backend.run(backend.launch_forward, x) for x in calls for _ in range(4)]
    launched.clear()
    left = [weakref.ref(x) for x in (*args[:3], no_rows.q, *(y for x in results for y in x))]
    del args, no_rows, calls, results
    return sum(x() is not None for x in left)


def what_is_known_is_bounded() -> list:
    prepared.MOST, most = 4, prepared.MOST
    for n in range(1, 20):
        call(operands(n), 2)
    prepared.MOST = most
    return [len(prepared._known), {type(x).__name__ for x in prepared._known.values()} == {"Plan"}]


def another_triton_launches_in_its_own_way() -> list:
    """Without what plans need of it."""
    args, annotate = operands(), nvidia.annotate_arguments
    del nvidia.annotate_arguments
    try:
        call(args, 4)
    finally:
        nvidia.annotate_arguments = annotate
    return [len(launched), len({x[FUNCTION] for x in launched}), [*prepared._known.values()]]


def an_error_in_a_watched_call_leaves_nothing() -> list:
    args = operands()
    call(args)
    messages = []
    try:
        backend.run(backend.launch_forward, (*args[:-2], 99, *args[-1:]))
    except ValueError as error:
        messages.append(str(error))

    def fail(*call_args):
        backend.launch_forward(*call_args)
        raise RuntimeError("no memory")

    for _ in range(2):
        try:
            backend.run(fail, args)
        except RuntimeError as error:
            messages.append(str(error))
    return [len(messages), watching.watcher is None]


RULES = (
    a_plan_comes_with_the_second_call, a_call_that_compiles_is_watched_again,
    hooks_see_repeated_launches, a_configuration_on_trial_runs,
    another_precision_takes_another_kernel, launches_go_to_the_current_stream,
    threads_launch_their_own_tensors, no_tensor_outlives_its_call, what_is_known_is_bounded,
    another_triton_launches_in_its_own_way, an_error_in_a_watched_call_leaves_nothing,
)  # fmt: skip

if __name__ == "__main__":
    ACTIVE.utils.launch = note
    found = {}
    for rule in RULES:
        launched.clear()
        prepared._known.clear()
        found[rule.__name__] = rule()
    print(json.dumps(found))
