"""Freed memory that is kept: by the page faults of arrays that are made again and again."""

import ctypes
import platform
import subprocess
import sys

import pytest

from jax_rope import allocator

PROGRAM = """
import resource
import jax, jax.numpy as jnp
from jax_rope import allocator

x = jnp.ones((1, 2560, 32, 128))
f = jax.jit(lambda x: x * 2)

def faults():
    for _ in range(20):  # each of XLA's threads may want memory of its own first
        f(x).block_until_ready()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        f(x).block_until_ready()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

before = faults()
print(allocator.keep_freed_memory(), before, faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="there is nothing to keep without glibc")
def test_no_page_faults():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    kept, before, after = done.stdout.split()
    assert kept == "True"
    assert int(before) > 0.9 * 10 * 40 * 2**20 / 4096  # each of ten arrays of 40 MiB is made of fresh pages
    assert int(after) < int(before) / 10


def test_without_glibc(monkeypatch):
    def no_library(name):
        raise TypeError("LoadLibrary() argument 1 must be str, not None")

    monkeypatch.setattr(ctypes, "CDLL", no_library)
    assert allocator.keep_freed_memory() is False
