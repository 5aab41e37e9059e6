"""How other libraries rotate. Each is imported only where it takes part."""

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import formulas
from .entry import CannotError, Entry, jitted
from .workloads import Case, Workload


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise CannotError(f"not installed: {name}") from error


def torch_hugging_face(case: Case) -> Entry:
    """Hugging Face's formula in eager PyTorch, tables made beforehand and cast to x's dtype."""
    torch = _imported("torch")
    half = case.workload.rotary.pairing == "half"
    dtype = getattr(torch, case.workload.dtype)

    def tensor(x: np.ndarray):
        if case.workload.dtype == "bfloat16":  # which NumPy does not have
            return torch.from_numpy(np.asarray(x).view(np.int16).copy()).view(torch.bfloat16)
        return torch.from_numpy(np.asarray(x).copy())

    def array(tensor) -> np.ndarray:
        tensor = tensor.detach()
        if case.workload.dtype == "bfloat16":
            return tensor.contiguous().view(torch.int16).numpy().view(jnp.bfloat16)
        return tensor.numpy()

    def rotated(x):
        if half:
            middle = x.shape[-1] // 2
            return torch.cat((-x[..., middle:], x[..., :middle]), dim=-1)
        return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)

    cos, sin = (torch.from_numpy(table).to(dtype) for table in formulas.tables(case.workload))
    backward = case.cotangents is not None
    xs = [tensor(x).requires_grad_(backward) for x in map(np.asarray, case.xs)]
    cotangents = [tensor(ct) for ct in map(np.asarray, case.cotangents or ())]

    def run() -> Sequence:
        ys = [x * cos + rotated(x) * sin for x in xs]
        return [*ys, *torch.autograd.grad(ys, xs, cotangents)] if backward else ys

    return Entry(run, lambda: [array(y) for y in run()])


def onnxruntime_operator(case: Case) -> Entry:
    """onnxruntime's ``com.microsoft.RotaryEmbedding`` on the CPU, tables made beforehand, results bound beforehand."""
    runtime, onnx = _imported("onnxruntime"), _imported("onnx")
    if case.workload.dtype != "float32":
        raise CannotError(f"the CPU's operator does not take {case.workload.dtype}")
    if case.cotangents is not None:
        raise CannotError("it only infers: no gradient")
    options = runtime.SessionOptions()
    # Its threads would take a core from whoever's turn is next.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    model = _onnx_model(onnx, case.workload).SerializeToString()
    session = runtime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    cos, sin = formulas.half_tables(case.workload)
    inputs = {"first": np.zeros(1, np.int64), "cos": cos, "sin": sin}
    ys = [np.empty(x.shape, np.float32) for x in case.xs]
    for i, (x, y) in enumerate(zip(case.xs, ys, strict=True)):
        inputs[f"x{i}"] = np.asarray(x).reshape(*x.shape[:2], -1)
        binding.bind_output(f"y{i}", "cpu", 0, np.float32, list(inputs[f"x{i}"].shape), y.ctypes.data)
    for name, array in inputs.items():
        binding.bind_cpu_input(name, np.ascontiguousarray(array))

    def results() -> Sequence[np.ndarray]:
        session.run_with_iobinding(binding)
        return ys

    return Entry(lambda: session.run_with_iobinding(binding), results)


def _onnx_model(onnx: Any, workload: Workload) -> Any:
    """One operator for each x, [B, S, H * D]; the tables have a row for each token, so positions count from 0."""
    helper, kinds = onnx.helper, onnx.TensorProto
    table = [workload.tokens, workload.head_dim // 2]
    inputs = [helper.make_tensor_value_info("first", kinds.INT64, [1])]
    inputs += [helper.make_tensor_value_info(name, kinds.FLOAT, table) for name in ("cos", "sin")]
    outputs, nodes = [], []
    for i, (batch, tokens, heads, head_dim) in enumerate(workload.shapes):
        shape = [batch, tokens, heads * head_dim]
        inputs.append(helper.make_tensor_value_info(f"x{i}", kinds.FLOAT, shape))
        outputs.append(helper.make_tensor_value_info(f"y{i}", kinds.FLOAT, shape))
        node = helper.make_node(
            "RotaryEmbedding",
            [f"x{i}", "first", "cos", "sin"],
            [f"y{i}"],
            domain="com.microsoft",
            interleaved=int(workload.rotary.pairing == "interleaved"),
        )
        nodes.append(node)
    graph = helper.make_graph(nodes, "rotary", inputs, outputs)
    domains = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=domains, ir_version=8)


def equinox_module(case: Case) -> Entry:
    """``equinox.nn.RotaryPositionalEmbedding`` under jit, mapped over batch and heads."""
    equinox = _imported("equinox")
    rotary, dtype = case.workload.rotary, case.workload.dtype
    if rotary.pairing != "half" or rotary.scaling is not None or case.workload.positions is not None:
        raise CannotError("it knows halves only, no scaling, and positions from 0")
    module = equinox.nn.RotaryPositionalEmbedding(case.workload.head_dim, rotary.theta, jnp.dtype(dtype))
    of_heads: Callable = jax.vmap(jax.vmap(module, in_axes=1, out_axes=1))
    return jitted(case, lambda xs: tuple(map(of_heads, xs)))
