"""``python -m jax_rope bench``: what rotations cost here, against their floors and against others' ways to rotate.

``command.py`` is the parent: it starts each measurement as a child (``children.py``), gathers what the child says
(``report.py``) and shows it (``tables.py``, ``plot.py``). A child is ``measure.py``, ``accuracy.py`` or ``memory.py``;
``workloads.py`` says what is rotated, and ``participants.py`` lists who takes part, from ``ours.py``, ``floors.py``,
``bare.py``, ``formulas.py`` and ``libraries.py``.
"""
