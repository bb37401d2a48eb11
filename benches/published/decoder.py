#!/usr/bin/env python3
"""Write the ONNX graph of a decoder that others have measured, weights absent.

As `make_decoder.py` of the shared tools, whose builder this uses, and with what its graphs lack: heads of another size than
hidden / heads, norms of queries and keys, mixtures of experts in three dims, biases, sliding windows in every other layer.

    pip install onnx numpy
    decoder.py --hidden 2048 --layers 48 --heads 32 --kv-heads 4 --head-dim 128 --qk-norm --vocab 151936 \\
        --experts 128 --top-k 8 --expert-ffn 768 --loss -o qwen3-30b-a3b.onnx                    # 30,532,122,624 parameters
    decoder.py --hidden 2880 --layers 36 --heads 64 --kv-heads 8 --head-dim 64 --vocab 201088 --biases --window 128 \\
        --experts 128 --top-k 4 --expert-ffn 2880 --clamped-gate --loss -o gpt-oss-120b.onnx      # without sinks
"""
import argparse
import sys
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "shared" / "tools"))
import make_decoder  # noqa: E402
from make_decoder import Builder, heads, linear, norm, rotate  # noqa: E402

# Below any score: softmax gives 0.
MASKED = -3e4


def head_norm(b, x, name, a):
    """RMS norm of each head, `[batch, heads, sequence, head_dim]`."""
    mean = b.op("ReduceMean", b.op("Mul", x, x), b.const([-1]), keepdims=1)
    root = b.op("Sqrt", b.op("Add", mean, b.const(1e-5, np.float32)))
    return b.op("Mul", b.op("Div", x, root), b.weight(f"{name}.weight", a.head_dim))


def repeat(b, x, a):
    """Each head of keys or values once per query head that reads it."""
    if a.kv_heads == a.heads:
        return x
    wide = b.op("Expand", b.op("Unsqueeze", x, b.const([2])), b.const([1, 1, a.heads // a.kv_heads, 1, 1]))
    shape = b.op("Concat", b.op("Shape", x, start=0, end=1), b.const([a.heads]), b.op("Shape", x, start=2, end=4), axis=0)
    return b.op("Reshape", wide, shape)


def attention(b, x, p, a, mask, rotary):
    d, wide = a.head_dim, a.heads * a.head_dim
    q, k, v = (heads(b, linear(b, x, f"{p}.{name}", a.hidden, n * d, a.biases), n, d)
               for name, n in (("q", a.heads), ("k", a.kv_heads), ("v", a.kv_heads)))
    if a.qk_norm:
        q, k = head_norm(b, q, f"{p}.q_norm", a), head_norm(b, k, f"{p}.k_norm", a)
    q, k = rotate(b, q, *rotary, d), rotate(b, k, *rotary, d)
    k, v = repeat(b, k, a), repeat(b, v, a)
    scores = b.op("MatMul", q, b.op("Transpose", k, perm=[0, 1, 3, 2]))
    scores = b.op("Add", b.op("Mul", scores, b.const(d ** -0.5, np.float32)), mask)
    mixed = b.op("MatMul", b.op("Softmax", scores, axis=-1), v)
    joined = b.op("Reshape", b.op("Transpose", mixed, perm=[0, 2, 1, 3]), b.const([0, 0, wide]))
    return linear(b, joined, f"{p}.o", wide, a.hidden, a.biases)


def mixture(b, x, p, a):
    e, f, h = a.experts, a.expert_ffn, a.hidden
    logits = b.op("Reshape", linear(b, x, f"{p}.router", h, e, a.biases), b.const([-1, e]))
    operands = []
    for name, n, k in (("gate", f, h), ("down", h, f), ("up", f, h)):
        operands += [b.weight(f"{p}.experts.{name}", e, n, k), b.weight(f"{p}.experts.{name}.bias", e, n) if a.biases else ""]
    if a.clamped_gate:
        kind = dict(activation_type="swiglu", swiglu_fusion=0, activation_alpha=1.702, activation_beta=1.0, swiglu_limit=7.0)
    else:
        kind = dict(activation_type="silu")
    return b.op("MoE", x, logits, *operands, domain="com.microsoft", k=a.top_k, normalize_routing_weights=1, **kind)


def mlp(b, x, p, a):
    if a.experts:
        return mixture(b, x, p, a)
    gate, up = (linear(b, x, f"{p}.{name}", a.hidden, a.ffn, a.biases) for name in ("gate", "up"))
    return linear(b, b.op("Mul", b.op("Mul", gate, b.op("Sigmoid", gate)), up), f"{p}.down", a.ffn, a.hidden, a.biases)


def tables(b, a, dtype):
    """Cosines and sines, and the masks of whole and of windowed attention."""
    positions = b.op("Range", b.const(0), b.op("Squeeze", b.op("Shape", "input_ids", start=1, end=2)), b.const(1))
    d = a.head_dim
    freq = b.const((a.rope_theta ** (-np.arange(0, d, 2) / d)).astype(np.float32), np.float32)
    angle = b.op("Mul", b.op("Unsqueeze", b.op("Cast", positions, to=dtype), b.const([1])), freq)
    angle = b.op("Concat", angle, angle, axis=-1)
    row, col = b.op("Unsqueeze", positions, b.const([1])), b.op("Unsqueeze", positions, b.const([0]))

    def mask(hidden):
        return b.op("Where", hidden, b.const(MASKED, np.float32), b.const(0.0, np.float32))
    later = b.op("Less", row, col)
    masks = [mask(later)]
    if a.window:
        before = b.op("LessOrEqual", col, b.op("Sub", row, b.const(a.window)))
        masks.insert(0, mask(b.op("Or", later, before)))
    return (b.op("Cos", angle), b.op("Sin", angle)), masks


def build(a):
    dtype = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}[a.dtype]
    b = Builder(dtype)
    x = b.op("Gather", b.weight("embed.weight", a.vocab, a.hidden), "input_ids")
    rotary, masks = tables(b, a, dtype)
    for i in range(a.layers):
        x = b.op("Add", x, attention(b, norm(b, x, f"{i}.norm1", a), f"{i}.attn", a, masks[i % len(masks)], rotary))
        x = b.op("Add", x, mlp(b, norm(b, x, f"{i}.norm2", a), f"{i}.mlp", a))
    x = norm(b, x, "final_norm", a)
    head = b.op("Transpose", "embed.weight", perm=[1, 0]) if a.tied else b.weight("lm_head.weight", a.hidden, a.vocab)
    logits = b.op("MatMul", x, head, out="logits")
    info = helper.make_tensor_value_info
    inputs = [info("input_ids", TensorProto.INT64, ["batch", "sequence"])]
    outputs = [info("logits", dtype, ["batch", "sequence", a.vocab])]
    if a.loss:
        inputs.append(info("labels", TensorProto.INT64, ["batch", "sequence"]))
        flat, labels = b.op("Reshape", logits, b.const([-1, a.vocab])), b.op("Reshape", "labels", b.const([-1]))
        b.op("SoftmaxCrossEntropyLoss", flat, labels, out="loss", reduction="mean", ignore_index=-100)
        outputs.insert(0, info("loss", dtype, []))
    graph = helper.make_graph(b.nodes, f"decoder-{a.layers}x{a.hidden}", inputs, outputs, b.inits)
    opsets = [helper.make_opsetid("", 21)] + ([helper.make_opsetid("com.microsoft", 1)] if a.experts else [])
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10, producer_name="decoder"), a.output)
    print(f"{a.output}: {b.parameters:,} parameters, {len(b.nodes)} nodes")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--family", choices=["gpt", "llama"], default="llama")
    for flag in ("layers", "hidden", "heads", "vocab"):
        p.add_argument(f"--{flag}", type=int, required=True)
    for flag in ("kv-heads", "head-dim", "ffn", "top-k", "expert-ffn"):
        p.add_argument(f"--{flag}", type=int)
    p.add_argument("--max-seq", type=int, default=2048, help="positions of a gpt's table")
    p.add_argument("--experts", type=int, default=0)
    p.add_argument("--window", type=int, default=0, help="keys that a query sees, in layers 0, 2, 4, ...")
    p.add_argument("--rope-theta", type=float, default=10000.0)
    p.add_argument("--dtype", choices=["float32", "float16", "bfloat16"], default="float32")
    p.add_argument("--qk-norm", action="store_true", help="queries and keys are normalised by head")
    p.add_argument("--biases", action="store_true", help="of all products but the head")
    p.add_argument("--clamped-gate", action="store_true", help="experts gate as GPT-OSS's do")
    p.add_argument("--tied", action="store_true", help="the head is the transposed embedding")
    p.add_argument("--loss", action="store_true")
    p.add_argument("-o", "--output", required=True)
    a = p.parse_args()
    a.kv_heads, a.ffn, head_dim = a.kv_heads or a.heads, a.ffn or 4 * a.hidden, a.hidden // a.heads
    if a.experts and not (a.top_k and a.expert_ffn):
        p.error("--experts needs --top-k and --expert-ffn")
    if a.clamped_gate and not a.experts:
        p.error("--clamped-gate is of experts: give --experts too")
    new = a.experts or a.window or a.qk_norm or a.biases or (a.head_dim or head_dim) != head_dim
    a.head_dim = a.head_dim or head_dim
    if not new:
        make_decoder.build(a)
    elif a.family == "gpt":
        p.error("head sizes, norms of queries, windows, biases and experts are of the family llama")
    else:
        build(a)


if __name__ == "__main__":
    main()
