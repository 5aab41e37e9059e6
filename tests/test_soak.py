"""Thousands of calls from many threads, and many in flight on one core: right results, and nothing that piles up.

Each runs in a process of its own, which is killed when it takes too long.
"""

import functools
import gc
import json
import os
import resource
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from test_processes import finish, start

from jax_rope import Rotary, config, configure, reference, rope, rope_qk, scaling
from jax_rope.arguments import canonical

DTYPES = (np.float32, ml_dtypes.bfloat16, np.float16)
THREADS = 8
CALLS = 4000
INT32 = np.iinfo(np.int32)


class Case:
    """One call and its right result: the first one, once that has been compared with the reference."""

    def __init__(self, call, xs, positions, rotary, **options):
        self._call = call
        ys = call()
        for x, y in zip(xs, ys, strict=True):
            found = reference.compare(y, reference.rotate(x, positions, rotary, **options), x, rotary, **options)
            if not found.holds:
                raise AssertionError(f"{x.shape} {x.dtype} {rotary}: {found}")
        self._expected = [np.asarray(y).tobytes() for y in ys]

    def run(self) -> bool:
        return [np.asarray(y).tobytes() for y in self._call()] == self._expected


def host_case(rng: np.random.Generator, large: bool) -> Case:
    """Through what the callbacks run. A large one is several pieces."""
    from jax_rope.webgpu import offload

    dtype = DTYPES[rng.integers(3)]
    pairs = int(rng.choice([1, 3, 4, 6, 16, 32]))
    rows, tokens = (1, 4000) if large else (int(rng.integers(1, 4)), int(rng.integers(1, 90)))
    pairs = 32 if large else pairs
    shapes = [(rows, tokens, int(rng.integers(1, 20)), 2 * pairs) for _ in range(rng.integers(1, 3))]
    xs = [rng.standard_normal(shape).astype(dtype) for shape in shapes]
    rotary = Rotary(
        theta=float(rng.choice([1e4, 5e5])),
        pairing=str(rng.choice(["interleaved", "half"])),
        scaling=scaling.YaRN(4, 64) if rng.integers(4) == 0 else None,
    )
    positions = [
        None,
        int(rng.integers(INT32.min, INT32.max)),
        rng.integers(-9999, 10**6, tokens),
        rng.integers(INT32.min, INT32.max, (rows, tokens)),
        rng.uniform(-9999, 9999, (rows, tokens)).astype(np.float32),
    ][rng.integers(2 if large else 5)]
    named = dict(zip("qk", map(jax.device_put, xs), strict=False))  # jnp.asarray compiles a copy for each shape
    layout, _, angles, _ = canonical(named, positions, rotary, -3, None, False)
    operands = [None if leaf is None else np.asarray(leaf) for leaf in angles]
    return Case(lambda: offload.rotate(layout, xs, *operands), xs, positions, rotary)


def jitted_cases(rng: np.random.Generator) -> list[Case]:
    """Through compiled programs, whose offsets change."""
    cases = []
    for tokens, dtype in ((1, np.float32), (40, ml_dtypes.bfloat16), (33, np.float16)):
        q, k = (rng.standard_normal((2, tokens, heads, 16)).astype(dtype) for heads in (4, 1))
        f = jax.jit(lambda q, k, offset: rope_qk(q, k, offset, implementation="webgpu"))
        for offset in rng.integers(INT32.min, INT32.max - 100, 10):
            cases.append(Case(functools.partial(f, q, k, np.int32(offset)), (q, k), int(offset), Rotary()))
    return cases


def in_threads(cases: list[Case], calls: int) -> int:
    """How many of these calls, cases in turn, came out right."""
    numbers = iter(range(calls))
    taking = threading.Lock()
    right = []

    def work():
        while True:
            with taking:
                number = next(numbers, None)
            if number is None:
                return
            right.append(cases[number % len(cases)].run())

    with ThreadPoolExecutor(THREADS) as pool:
        for future in [pool.submit(work) for _ in range(THREADS)]:
            future.result()
    return sum(right)


def many_calls() -> None:
    """Prints how many were right, and what was alive and how much memory was in use at the most, early and late."""
    import wgpu

    rng = np.random.default_rng(7)
    cases = jitted_cases(rng) + [host_case(rng, large=i % 100 == 0) for i in range(300)]
    rng.shuffle(cases)
    warm = in_threads(cases, 2 * len(cases))

    def used():
        gc.collect()
        live = wgpu.diagnostics.object_counts.get_dict()
        return {kind: of["count"] for kind, of in live.items()}, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    early = used()
    right = in_threads(cases, CALLS)
    print(json.dumps({"warm": warm == 2 * len(cases), "right": right, "early": early, "late": used()}))


def program(name: str, **environment):
    return start(["-c", f"import sys; sys.path.insert(0, 'tests'); import test_soak; test_soak.{name}"], **environment)


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_thousands_of_calls_from_eight_threads():
    """Every result is right; objects and memory are what they are when each kind of call ran twice."""
    # Each of glibc's arenas, up to eight a core, would keep the memory of the largest array that it ever held.
    found = json.loads(finish(program("many_calls()", MALLOC_ARENA_MAX="1"), 240))
    assert found["warm"] and found["right"] == CALLS
    (objects, memory), (objects_late, memory_late) = found["early"], found["late"]
    assert objects_late == objects
    # Its unit is KiB on Linux and bytes on macOS. Results alone are several hundred MiB a thousand calls.
    unit = 1 << 10 if sys.platform.startswith("linux") else 1
    assert (memory_late - memory) * unit < 32 << 20, found


def in_flight(transport: str) -> None:
    """Compiled programs on one core: dependent and independent calls, none waited for, from several threads."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    if transport == "pure_callback" and jax.__version_info__ < (0, 12):
        # jax-ml/jax#25861: with it, this transport can wait for itself there, and is never chosen.
        jax.config.update("jax_cpu_enable_async_dispatch", False)
    configure(transport=transport)
    x = np.random.default_rng(3).standard_normal((2, 96, 4, 32)).astype(np.float32)
    there = jax.jit(lambda x, offset: rope(x, offset, implementation="webgpu"))
    back = jax.jit(lambda x, offset: rope(x, offset, inverse=True, implementation="webgpu"))
    step = jax.jit(jax.grad(lambda x, offset: jnp.sum(rope(x, offset, implementation="webgpu") ** 2)))
    right = []

    def work(first: int) -> None:
        running = []
        for offset in range(first, first + 12):
            y = there(x, offset)
            running.append((offset, y, back(there(back(y, offset), offset), offset), step(x, offset)))
        for offset, y, z, gradient in reversed(running):
            holds = reference.compare(np.asarray(y), reference.rotate(x, offset), x).holds
            right.append(
                holds and np.allclose(z, x, rtol=0, atol=1e-5) and np.allclose(gradient, 2 * x, rtol=0, atol=1e-5)
            )

    work(0)
    threads = [threading.Thread(target=work, args=(10**6 * n,)) for n in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(config.transport(), len(right), all(right))


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no process affinity")
@pytest.mark.parametrize("transport", config.TRANSPORTS)
def test_many_calls_in_flight_on_one_core(transport):
    assert finish(program(f"in_flight({transport!r})"), 100).split() == [transport, "60", "True"]
