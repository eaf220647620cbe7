"""A Qwen3 checkpoint as an OpenVINO model, in float32, or with matrices in int8.

The shape of the graph is that of the models which OpenVINO's own exporter writes (keys and values in state variables,
``beam_idx`` to reorder them, scaled dot-product attention), since ``ContinuousBatchingPipeline`` recognises it and puts
paged attention in the place of the attention and its mask.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Node = Any
"""An ``openvino.Node``; the package ships no types that a checker can follow."""


def openvino_model(folder: Path, weights: str = "float32") -> Path:
    """Return the folder ``openvino``, ``openvino-float16`` or ``openvino-int8``, beside the checkpoint's files with
    openvino_model.xml and .bin, written on first use. In float16 constants have 16 bits, as from OpenVINO's own
    exporter. In int8 each row of a matrix, also of the embeddings, has a scale, as from there.
    """
    import openvino
    from safetensors.numpy import load_file

    out = folder / ("openvino" if weights == "float32" else f"openvino-{weights}")
    if not out.exists():
        config = json.loads((folder / "config.json").read_text())
        model = _Builder(config, load_file(folder / "model.safetensors"), int8=weights == "int8").model()
        partial = out.with_suffix(".partial")
        partial.mkdir(exist_ok=True)
        openvino.save_model(model, partial / "openvino_model.xml", compress_to_fp16=weights == "float16")
        (partial / "config.json").write_text(json.dumps(config))
        partial.rename(out)
    return out


@dataclass(frozen=True, slots=True)
class _Inputs:
    batch: Node
    """``[1]``: number of sequences in the batch."""
    beams: Node
    cos: Node
    sin: Node
    """``[batch, 1, tokens, head_dim]``."""
    mask: Node
    """``[batch, 1, tokens, past + tokens]``, added to the scores."""


class _Builder:
    def __init__(self, config: dict[str, Any], tensors: dict[str, Any], *, int8: bool) -> None:
        import numpy
        import openvino
        from openvino import opset13

        self._np, self._ov, self._ops = numpy, openvino, opset13
        self._config, self._tensors, self._int8 = config, tensors, int8
        self._sinks: list[Node] = []

    def model(self) -> Any:
        ops, config = self._ops, self._config
        parameters = {}
        for name, shape in {
            "input_ids": [-1, -1],
            "attention_mask": [-1, -1],
            "position_ids": [-1, -1],
            "beam_idx": [-1],
        }.items():
            kind = self._np.int32 if name == "beam_idx" else self._np.int64
            parameters[name] = ops.parameter(shape, kind, name=name)
            parameters[name].output(0).get_tensor().set_names({name})
        ids, positions = parameters["input_ids"], parameters["position_ids"]
        batch = ops.gather(ops.shape_of(ids), self._ints(0, shape=(1,)), self._ints(0))
        cos, sin = self._rotations(positions, batch)
        mask = self._mask(parameters["attention_mask"], ids)
        inputs = _Inputs(batch, parameters["beam_idx"], cos, sin, mask)
        hidden = ops.gather(self._weight("model.embed_tokens.weight"), ops.convert(ids, "i32"), self._ints(0))
        for index in range(config["num_hidden_layers"]):
            hidden = self._layer(index, hidden, inputs)
        logits = self._linear(self._norm(hidden, "model.norm.weight"), "lm_head.weight")
        result = ops.result(logits, name="logits")
        result.output(0).get_tensor().set_names({"logits"})
        return self._ov.Model([result], self._sinks, list(parameters.values()), "qwen3")

    def _layer(self, index: int, hidden: Node, inputs: _Inputs) -> Node:
        ops, config, prefix = self._ops, self._config, f"model.layers.{index}."
        heads, kv_heads, size = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
        normal = self._norm(hidden, prefix + "input_layernorm.weight")
        query, key, value = (
            ops.reshape(
                self._linear(normal, f"{prefix}self_attn.{letter}_proj.weight"),
                self._ints(0, 0, count, size),
                special_zero=True,
            )
            for letter, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        query = self._norm(query, prefix + "self_attn.q_norm.weight")
        key = self._norm(key, prefix + "self_attn.k_norm.weight")
        query, key, value = (ops.transpose(tensor, self._ints(0, 2, 1, 3)) for tensor in (query, key, value))
        query, key = (self._rotated(tensor, inputs) for tensor in (query, key))
        key = self._repeated(self._kept(f"past_key_values.{index}.key", key, inputs), inputs)
        value = self._repeated(self._kept(f"past_key_values.{index}.value", value, inputs), inputs)
        mixed = ops.transpose(ops.scaled_dot_product_attention(query, key, value, inputs.mask), self._ints(0, 2, 1, 3))
        mixed = ops.reshape(mixed, self._ints(0, 0, heads * size), special_zero=True)
        hidden = ops.add(hidden, self._linear(mixed, prefix + "self_attn.o_proj.weight"))
        normal = self._norm(hidden, prefix + "post_attention_layernorm.weight")
        gate = ops.swish(self._linear(normal, prefix + "mlp.gate_proj.weight"))
        inner = ops.multiply(gate, self._linear(normal, prefix + "mlp.up_proj.weight"))
        return ops.add(hidden, self._linear(inner, prefix + "mlp.down_proj.weight"))

    def _kept(self, name: str, new: Node, inputs: _Inputs) -> Node:
        """Return the keys or values of all tokens: those of the state variable, followed by the new ones."""
        ops, count, size = self._ops, self._config["num_key_value_heads"], self._config["head_dim"]
        empty = ops.concat([inputs.batch, self._ints(count, 0, size)], 0)
        start = ops.broadcast(self._floats(0.0), empty)
        past = ops.read_value(start, name, self._ov.Type.f32, [-1, count, -1, size])
        both = ops.concat([ops.gather(past, inputs.beams, self._ints(0)), new], 2)
        self._sinks.append(ops.assign(both, name))
        return both

    def _repeated(self, tensor: Node, inputs: _Inputs) -> Node:
        """Repeat each key-value head for every query head that reads it."""
        ops, config = self._ops, self._config
        heads, count, size = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
        shape = ops.concat([inputs.batch, self._ints(count, heads // count, 1, size)], 0)
        spread = ops.broadcast(ops.unsqueeze(tensor, self._ints(2)), shape, broadcast_spec="BIDIRECTIONAL")
        return ops.reshape(spread, self._ints(0, heads, -1, size), special_zero=True)

    def _rotations(self, positions: Node, batch: Node) -> tuple[Node, Node]:
        ops, size = self._ops, self._config["head_dim"]
        theta = self._config["rope_parameters"]["rope_theta"]
        frequencies = theta ** (-self._np.arange(0, size, 2, dtype=self._np.float64) / size)
        table = ops.constant(frequencies.astype(self._np.float32).reshape(1, -1, 1))
        table = ops.broadcast(table, ops.concat([batch, self._ints(1, 1)], 0), broadcast_spec="BIDIRECTIONAL")
        angles = ops.matmul(table, ops.convert(ops.unsqueeze(positions, self._ints(1)), "f32"), False, False)
        angles = ops.transpose(angles, self._ints(0, 2, 1))
        angles = ops.concat([angles, angles], -1)
        return ops.unsqueeze(ops.cos(angles), self._ints(1)), ops.unsqueeze(ops.sin(angles), self._ints(1))

    def _rotated(self, tensor: Node, inputs: _Inputs) -> Node:
        ops, half = self._ops, self._config["head_dim"] // 2
        step, axis, end = self._ints(1, shape=(1,)), self._ints(3, shape=(1,)), self._ints(2**31 - 1, shape=(1,))
        middle = self._ints(half, shape=(1,))
        first = ops.slice(tensor, self._ints(0, shape=(1,)), middle, step, axis)
        second = ops.multiply(ops.slice(tensor, middle, end, step, axis), self._floats(-1.0, shape=(1, 1, 1, 1)))
        turned = ops.multiply(ops.concat([second, first], -1), inputs.sin)
        return ops.add(ops.multiply(tensor, inputs.cos), turned)

    def _mask(self, attention_mask: Node, ids: Node) -> Node:
        """Return the mask: 0 for visible tokens, and a large negative number for later tokens and padding."""
        ops = self._ops
        total, new = (
            ops.gather(ops.shape_of(tensor), self._ints(1), self._ints(0)) for tensor in (attention_mask, ids)
        )
        columns = ops.range(self._ints(0), total, self._ints(1), "i64")
        rows = ops.range(ops.subtract(total, new), total, self._ints(1), "i64")
        visible = ops.less_equal(columns, ops.unsqueeze(rows, self._ints(1)))
        visible = ops.logical_and(visible, ops.unsqueeze(ops.convert(attention_mask, "boolean"), self._ints(1)))
        return ops.unsqueeze(ops.select(visible, self._floats(0.0), self._floats(-65504.0)), self._ints(1))

    def _norm(self, tensor: Node, name: str) -> Node:
        ops, weight = self._ops, self._tensors[name]
        rank = (1,) * (len(tensor.get_output_partial_shape(0)) - 1)
        square = ops.power(tensor, self._floats(2.0, shape=(*rank, 1)))
        mean = ops.reduce_mean(square, self._ints(-1, shape=(1,)), True)
        root = ops.sqrt(ops.add(mean, self._floats(self._config["rms_norm_eps"], shape=(*rank, 1))))
        normal = ops.multiply(tensor, ops.divide(self._floats(1.0, shape=(*rank, 1)), root))
        return ops.multiply(normal, ops.constant(weight.reshape(*rank, -1)))

    def _linear(self, tensor: Node, name: str) -> Node:
        return self._ops.matmul(tensor, self._weight(name), False, True)

    def _weight(self, name: str) -> Node:
        ops, np, weight = self._ops, self._np, self._tensors[name]
        if not self._int8:
            return ops.constant(weight, name=name)
        scales = np.abs(weight).max(axis=1, keepdims=True) / 127
        codes = ops.constant(np.round(weight / scales).astype(np.int8), name=name)
        return ops.multiply(ops.convert(codes, "f32"), ops.constant(scales))

    def _ints(self, *values: int, shape: tuple[int, ...] | None = None) -> Node:
        array = self._np.array(values if len(values) > 1 else values[0], self._np.int64)
        return self._ops.constant(array if shape is None else array.reshape(shape))

    def _floats(self, value: float, shape: tuple[int, ...] = ()) -> Node:
        return self._ops.constant(self._np.full(shape, value, self._np.float32))
