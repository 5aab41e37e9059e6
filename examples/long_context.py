"""Relative positions at a million tokens and beyond: the score of a query and a key 100 tokens apart, at every place.

RoPE promises that <q at p, k at p + d> depends on d alone. In real numbers that is a theorem; with float32 angles it
stops being true, since an angle of a million radians is only known to a sixteenth of one. Here angles are counted in
turns as fixed-point numbers, in which whole turns vanish and the rest is exact.

``python examples/long_context.py`` prints the drift, and ``--plot FILE.png`` draws it.
"""

import argparse
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from jax_rope import Rotary, adapters, rope

HEAD, APART = 128, 100
THETA = 10_000.0


def usual(x: jax.Array, positions: jax.Array) -> jax.Array:
    """The formula as most code has it: the angles, for x [S, H, D] and positions [S], are float32 products."""
    omega = THETA ** (-jnp.arange(0, HEAD, 2, dtype=jnp.float32) / HEAD)
    angles = (positions.astype(jnp.float32)[:, None] * omega)[:, None]
    c, s = jnp.cos(angles), jnp.sin(angles)
    x1, x2 = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([c * x1 - s * x2, s * x1 + c * x2], axis=-1)


def drift(rotate, places: np.ndarray) -> np.ndarray:
    """How far the score at each of these places is from that at place 0, for a query and a key of length 1."""
    q, k = np.random.default_rng(0).standard_normal((2, HEAD)).astype(np.float32)
    q, k = (jnp.broadcast_to(v / np.linalg.norm(v), (len(places), 1, HEAD)) for v in (q, k))
    rotated = rotate(q, jnp.asarray(places, jnp.int32)), rotate(k, jnp.asarray(places + APART, jnp.int32))
    # Summed in float64, so that what is seen is the rotation's error and not the sum's.
    a, b = (np.asarray(v, np.float64)[:, 0] for v in rotated)
    scores = (a * b).sum(axis=-1)
    return np.abs(scores - scores[0])


def main() -> None:
    parser = argparse.ArgumentParser(description="Drift of a score with the position of query and key.")
    parser.add_argument("--plot", metavar="FILE.png", help="draw it (needs matplotlib)")
    arguments = parser.parse_args()

    implementation = "webgpu" if adapters() else "jnp"
    rotary = Rotary(theta=THETA, pairing="half")
    limits = [10**i for i in range(1, 10)] + [2**31 - 1 - APART]
    # Place 0, to compare with, and a hundred from each limit to the next.
    spans = [np.geomspace(low, high, 100).astype(np.int64) for low, high in itertools.pairwise(limits)]
    places = np.concatenate([[0], *spans])

    ours = drift(lambda x, positions: rope(x, positions, rotary, implementation=implementation), places)
    theirs = drift(jax.jit(usual), places)
    print(f"drift of a score, query and key of length 1, {APART} tokens apart ({implementation}):")
    print(f"{'positions up to':>16} {'here':>8} {'float32 angles':>15}")
    for limit, a, b in zip(limits[1:], *(e[1:].reshape(-1, 100).max(axis=1) for e in (ours, theirs)), strict=True):
        print(f"{limit:>16,} {a:>8.0e} {b:>15.0e}")
    assert ours.max() < 1e-6, "the score depends on the position"
    print(f"here it is below 1e-6 everywhere: {ours.max() < 1e-6}")

    if arguments.plot:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.add_subplot()
        axes.loglog(places[1:], np.maximum(theirs[1:], 1e-9), ".", color="#D55E00", label="float32 angles")
        axes.loglog(places[1:], np.maximum(ours[1:], 1e-9), ".", color="#0072B2", label="jax_rope")
        axes.axvline(1e6, color="gray", linewidth=0.8, label="a million tokens")
        axes.set(xlabel="position of the query", ylabel="drift of the score", title="<q at p, k at p + 100> over p")
        axes.legend()
        figure.savefig(arguments.plot, dpi=120)
        print("plotted to", arguments.plot)


if __name__ == "__main__":
    main()
