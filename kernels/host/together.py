"""Compiles the kernels of a launch side by side.

Triton compiles a kernel when it is first launched, and a launcher launches up to 14 of them. Four
fifths of that time are compiler passes that release Python's lock, and ptxas, which is a process.
So a launcher stops at the first kernel that is not compiled. It then runs once more and launches
nothing: the kernels that are missing are compiled in threads. Then it runs in earnest.

A launcher may run again because it owns all that it writes. It reads no value of a tensor.

In the tests a stand-in takes the driver's place.
"""

from __future__ import annotations

import contextlib
import contextvars
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import triton
from triton.runtime.jit import JITFunction

from ..tile.launching import watching
from .launch import KERNELS

Result = TypeVar("Result")


class Missing(BaseException):
    """A kernel is not compiled yet."""


class _State(threading.local):
    """Whether this thread's launch may end at a kernel that is missing."""

    may_end = False


_state = _State()
_turn = threading.Lock()


def run(launch: Callable[[], Result]) -> Result:
    """``launch()``, whose kernels are compiled side by side where they are not compiled yet."""
    _state.may_end = True
    try:
        return launch()
    except Missing:
        watching.compiled = True
    finally:
        _state.may_end = False
    contextvars.Context().run(_compile, launch)  # apart from an AsyncCompileMode of the caller
    return launch()


def _compile(launch: Callable[[], object]) -> None:
    """Compiles what a launch misses. What fails does so again in ``run``, where it is raised."""
    with (
        _turn,
        _only_compiling(),
        ThreadPoolExecutor() as pool,
        triton.AsyncCompileMode(pool, ignore_errors=True),
    ):
        launch()


def end_at_missing(hook):
    """A hook before Triton compiles, which ends a launch of ``run``; ``hook`` is asked first."""

    def before_compiling(*args, **about):
        handled = hook(*args, **about) if hook is not None else None
        if _state.may_end and not handled and about["fn"].module.startswith(KERNELS):
            raise Missing
        return handled

    return before_compiling


triton.knobs.runtime.jit_cache_hook = end_at_missing(triton.knobs.runtime.jit_cache_hook)


@contextlib.contextmanager
def _only_compiling() -> Iterator[None]:
    """Within it, this thread's launches of these kernels compile, and launch nothing."""
    kernels, thread = _kernels(), threading.get_ident()
    for kernel in kernels:
        kernel.run = _compile_in(thread, kernel)
    try:
        yield
    finally:
        for kernel in kernels:
            del kernel.run
            # Copies: another thread's first launch on its device adds a cache.
            for compiled, *_ in [*kernel.device_caches.values()]:
                for key in [k for k, x in [*compiled.items()] if _has_failed(x)]:
                    del compiled[key]


def _compile_in(thread: int, kernel: JITFunction) -> Callable:
    def run(*args, warmup, **options):
        warmup = warmup or threading.get_ident() == thread
        return JITFunction.run(kernel, *args, warmup=warmup, **options)

    return run


def _has_failed(found: object) -> bool:
    return isinstance(found, triton.FutureKernel) and found.kernel is None


def _kernels() -> list[JITFunction]:
    modules = [m for name, m in list(sys.modules.items()) if name.startswith(KERNELS)]
    return list(
        {id(x): x for m in modules for x in vars(m).values() if type(x) is JITFunction}.values()
    )
