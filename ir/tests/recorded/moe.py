"""What ONNX Runtime's CPU provider computes for `com.microsoft.MoE`, as the table of `ir/tests/moe.rs`.

    pip install onnxruntime onnx numpy
    python ir/tests/recorded/moe.py
"""
import numpy as np
import onnxruntime
from onnx import TensorProto, helper

EXPERTS, FFN, HIDDEN = 4, 3, 2
OPERANDS = ["x", "logits", "fc1", "fc1_bias", "fc2", "fc2_bias"]
GPT_OSS = {"activation_type": "swiglu", "swiglu_fusion": 1, "activation_alpha": 1.702, "activation_beta": 1.0,
           "swiglu_limit": 1.0}
# Dims of rows, whether experts have biases, attributes.
CASES = [
    ([3], False, {}),
    ([3], True, {"activation_type": "gelu", "k": 2}),
    ([2, 2], False, {"activation_type": "silu", "k": 2, "normalize_routing_weights": 1}),
    ([2, 2], True, {"activation_type": "identity", "k": 4, "normalize_routing_weights": 1}),
    ([3], False, {"activation_type": "swiglu", "swiglu_fusion": 1, "k": 3}),
    ([2, 2], True, {**GPT_OSS, "k": 2, "normalize_routing_weights": 1}),
]


def numbers(seed, dims):
    """From -1 to 1, of which no two neighbours are alike; `numbers` of the test has the same."""
    i = np.arange(int(np.prod(dims)))
    return ((((i + seed) * (i + 3 * seed + 7) * 37 + 11 * seed) % 101 - 50) / 50).astype(np.float32).reshape(dims)


def run(rows, biases, attributes):
    wide = FFN * (2 if attributes.get("activation_type") == "swiglu" else 1)
    dims = [rows + [HIDDEN], [int(np.prod(rows)), EXPERTS], [EXPERTS, wide, HIDDEN], [EXPERTS, wide],
            [EXPERTS, HIDDEN, FFN], [EXPERTS, HIDDEN]]
    given = {name: numbers(seed + 1, d) for seed, (name, d) in enumerate(zip(OPERANDS, dims))
             if biases or not name.endswith("bias")}
    info = helper.make_tensor_value_info
    node = helper.make_node("MoE", [n if n in given else "" for n in OPERANDS], ["y"], domain="com.microsoft", **attributes)
    graph = helper.make_graph([node], "moe", [info(n, TensorProto.FLOAT, v.shape) for n, v in given.items()],
                              [info("y", TensorProto.FLOAT, rows + [HIDDEN])])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, given)[0]


if __name__ == "__main__":
    print(f"// onnxruntime {onnxruntime.__version__}")
    for case in CASES:
        print("&[" + ", ".join(repr(float(f"{v:.7g}")) for v in run(*case).ravel()) + "],", "//", case)
