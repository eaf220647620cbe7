"""A GGUF file computes what the checkpoint computes that it was made from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.device import CPU, DeviceConfig
from engine.gguf.folder import open_gguf_folder, weight_files
from engine.models.config import read_raw_config
from engine.models.families.read import decoder_config
from engine.models.load import load_model
from engine.protocol.types import Branch, Completion, EngineError
from engine.weights.gguf import GgufWeights
from engine.weights.matrices.blocks import BlockMatrix
from engine.weights.matrices.grouped import GroupedMatrix
from engine.weights.matrix import dense
from kernels.cpu.linear.ggml.packed import product_kernel
from kernels.cpu.runtime import kernel
from kernels.linear import blocks
from tests.closeness import EPS
from tests.engine.conftest import save_random_model
from tests.engine.exact import gap
from tests.engine.gguf.files import write_gguf
from tests.engine.gpu import EMULATED_GPU
from tests.engine.helpers import Harness, generate
from tests.engine.probes import plant_probe
from tests.engine.quantization.test_mxfp4 import write_models as write_mxfp4

WIDE = {"hidden_size": 96, "head_dim": 16, "intermediate_size": 128}
"""Sizes in whole blocks of 32."""
THETA = {"rope_theta": 500_000.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32.0} | THETA
LATENT = {
    **{"head_dim": None, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 8},
    **{"v_head_dim": 16, "num_key_value_heads": 6, "n_routed_experts": 4, "n_shared_experts": 2},
    **{"num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1},
    **{"routed_scaling_factor": 1.5, "num_hidden_layers": 2, "num_attention_heads": 6},
}
DELTA = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 32}
EXPERTS = {
    **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 32},
}
GEMMA4 = {
    **{"num_hidden_layers": 4, "sliding_window": 20, "global_head_dim": 32, "num_global_key_value_heads": None},
    **{"layer_types": ["sliding_attention", "full_attention"] * 2, "tie_word_embeddings": True},
    **{"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 400, "num_kv_shared_layers": 0},
}
MAMBA = {"mamba_n_heads": 12, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_chunk_size": 16}
GRANITE = MAMBA | {
    **{"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.25, "logits_scaling": 4.0},
    **{"shared_intermediate_size": 64, "num_attention_heads": 6, "head_dim": None},
}
NEMOTRON = {
    **{"mamba_num_heads": 12, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2, "chunk_size": 16},
    "num_hidden_layers": 5,
}
FALCON = MAMBA | {
    **{"mamba_d_ssm": 192, "mamba_rms_norm": True, "mamba_norm_before_gate": False},
    **{"embedding_multiplier": 2.0, "lm_head_multiplier": 0.5, "mlp_multipliers": [2.0, 0.5], "key_multiplier": 0.25},
    **{"ssm_in_multiplier": 2.0, "attention_in_multiplier": 2.0, "attention_out_multiplier": 0.5},
    **{"ssm_out_multiplier": 0.25, "ssm_multipliers": [0.5, 2.0, 1.0, 0.25, 4.0]},
}
"""Factors that are powers of 2, so that weights are exactly multiplied by them."""
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "LlamaForCausalLM", {"rope_theta": 5000.0}),
    "llama, tied": ("llama", "LlamaForCausalLM", {"tie_word_embeddings": True}),
    "qwen2": ("qwen2", "Qwen2ForCausalLM", {}),
    "qwen3": ("qwen3", "Qwen3ForCausalLM", {"tie_word_embeddings": True}),
    "qwen2vl": ("qwen2vl", "Qwen2ForCausalLM", {}),
    "qwen3vl": ("qwen3vl", "Qwen3ForCausalLM", {}),
    "qwen3vlmoe": (
        "qwen3vlmoe",
        "Qwen3MoeForCausalLM",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True},
    ),
    "gemma2": (
        "gemma2",
        "Gemma2ForCausalLM",
        {"sliding_window": 20, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 3.0}
        | {"final_logit_softcapping": 5.0},
    ),
    "gemma3": (
        "gemma3",
        "Gemma3ForCausalLM",
        {"sliding_window": 20, "query_pre_attn_scalar": 16, "num_hidden_layers": 7, "rope_theta": 9000.0}
        | {"tie_word_embeddings": True},
    ),
    "mixtral": ("llama", "MixtralForCausalLM", {"num_local_experts": 3, "num_experts_per_tok": 2}),
    "qwen3moe": (
        "qwen3moe",
        "Qwen3MoeForCausalLM",
        {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True},
    ),
    "smollm3": ("smollm3", "SmolLM3ForCausalLM", {"num_hidden_layers": 4}),
    "olmo3": (
        "olmo2",
        "Olmo3ForCausalLM",
        {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]}
        | {"rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_type": "default"} | THETA}},
    ),
    "ministral3": (
        "mistral3",
        "Ministral3ForCausalLM",
        {
            "sliding_window": None,
            "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5},
        },
    ),
    "granite": (
        "granite",
        "GraniteForCausalLM",
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.25, "logits_scaling": 4.0},
    ),
    "gpt-oss": (
        "gpt-oss",
        "GptOssForCausalLM",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 20}
        | {"rope_parameters": YARN | {"truncate": False}},
    ),
    "lfm2": (
        "lfm2",
        "Lfm2ForCausalLM",
        {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 32},
    ),
    "deepseek_v2": (
        "deepseek2",
        "DeepseekV2ForCausalLM",
        LATENT | {"q_lora_rank": None, "topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1},
    ),
    "deepseek_v3": (
        "deepseek2",
        "DeepseekV3ForCausalLM",
        LATENT | {"n_group": 2, "topk_group": 1, "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}},
    ),
    "glm4_moe_lite": ("deepseek2", "Glm4MoeLiteForCausalLM", LATENT),
    "qwen3next": ("qwen3next", "Qwen3NextForCausalLM", DELTA | EXPERTS | {"num_hidden_layers": 4}),
    "qwen35": ("qwen35", "Qwen3_5ForCausalLM", DELTA | {"num_hidden_layers": 4, "linear_num_key_heads": 4}),
    "qwen35moe": (
        "qwen35moe",
        "Qwen3_5MoeForCausalLM",
        DELTA | EXPERTS | {"num_hidden_layers": 4, "linear_num_key_heads": 4},
    ),
    "gemma4": ("gemma4", "Gemma4ForCausalLM", GEMMA4),
    "gemma4, shared keys": (
        "gemma4",
        "Gemma4ForCausalLM",
        GEMMA4
        | {"num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3}
        | {"num_kv_shared_layers": 2, "attention_k_eq_v": True, "num_global_key_value_heads": 1}
        | {"use_double_wide_mlp": True, "final_logit_softcapping": 5.0},
    ),
    "gemma4, experts": (
        "gemma4",
        "Gemma4ForCausalLM",
        GEMMA4
        | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 64}
        | {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True},
    ),
    "granitehybrid": (
        "granitehybrid",
        "GraniteMoeHybridForCausalLM",
        GRANITE
        | {"layer_types": ["mamba", "attention", "mamba"], "num_hidden_layers": 3, "tie_word_embeddings": True}
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32},
    ),
    "granitehybrid, dense": (
        "granitehybrid",
        "GraniteMoeHybridForCausalLM",
        GRANITE
        | {"layer_types": ["mamba", "attention"], "num_local_experts": 0, "intermediate_size": 64}
        | {"position_embedding_type": "rope", "mamba_proj_bias": True, "mamba_conv_bias": False},
    ),
    "nemotron_h": (
        "nemotron_h",
        "NemotronHForCausalLM",
        NEMOTRON | {"layers_block_type": ["mamba", "mlp", "mamba", "attention", "mlp"]},
    ),
    "nemotron_h_moe": (
        "nemotron_h_moe",
        "NemotronHForCausalLM",
        NEMOTRON
        | {"layers_block_type": ["mamba", "moe", "attention", "moe", "mamba"], "routed_scaling_factor": 1.5}
        | {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
        | {"moe_shared_expert_intermediate_size": 64, "moe_latent_size": 32},
    ),
    "falcon-h1": ("falcon-h1", "FalconH1ForCausalLM", FALCON),
    "falcon-h1, no norm": ("falcon-h1", "FalconH1ForCausalLM", FALCON | {"mamba_rms_norm": False}),
    "mamba2": (
        "mamba2",
        "Mamba2ForCausalLM",
        {"num_heads": 12, "head_dim": 16, "state_size": 16, "expand": 2, "n_groups": 2, "tie_word_embeddings": True},
    ),
    "phi3": ("phi3", "Phi3ForCausalLM", {"head_dim": None, "sliding_window": 20}),
}
TOKENS = tuple(range(3, 60))


def make(case: str, tmp_path: Path, kind: GGMLQuantizationType = GGMLQuantizationType.F32) -> tuple[Path, Path]:
    """Return the folder of a checkpoint and the path of the same model as a GGUF file."""
    architecture, class_name, options = CASES[case]
    folder, file = tmp_path / "checkpoint", tmp_path / "model.gguf"
    save_random_model(class_name, {"initializer_range": 0.3} | WIDE | options, folder)
    write_gguf(folder, file, architecture, kind)
    return folder, file


def complete(folder: Path) -> Completion:
    request = generate(TOKENS, [Branch(1, 1, 30)], temperature=0.0, logprobs=5)
    (completion,) = Harness(folder).complete(request)
    return completion


@pytest.mark.parametrize("case", CASES)
def test_a_file_in_float32_generates_bitwise_as_its_checkpoint(case: str, tmp_path: Path) -> None:
    folder, file = make(case, tmp_path)
    ours, expected = complete(open_gguf_folder(file)), complete(folder)
    assert ours.token_ids == expected.token_ids
    assert ours.logprobs == expected.logprobs
    assert ours.text == expected.text


@pytest.mark.parametrize("case", [case for case in CASES if case != "glm4_moe_lite"])  # which is read as DeepSeek-V3
def test_a_files_config_is_one_of_transformers_own(case: str, tmp_path: Path) -> None:
    folder, file = make(case, tmp_path)
    read, expected = AutoConfig.from_pretrained(open_gguf_folder(file)), AutoConfig.from_pretrained(folder)
    assert type(read) is type(expected)
    for name in ("model_type", "architectures", "hidden_size", "num_hidden_layers", "vocab_size"):
        assert getattr(read, name) == getattr(expected, name), name


def test_gpt_oss_in_mxfp4_computes_bitwise_as_its_checkpoint(tmp_path: Path) -> None:
    checkpoint, _ = write_mxfp4(tmp_path, 0)
    write_gguf(checkpoint, tmp_path / "model.gguf", "gpt-oss")
    assert GgufWeights([tmp_path / "model.gguf"]).block_formats() == ["MXFP4"]
    ours, expected = complete(open_gguf_folder(tmp_path / "model.gguf")), complete(checkpoint)
    assert ours.token_ids == expected.token_ids
    assert ours.logprobs == expected.logprobs


@pytest.mark.parametrize("case", ["qwen35", "qwen35moe"])
def test_value_heads_in_llama_cpps_order_compute_the_same(case: str, tmp_path: Path) -> None:
    """Heads that share a key head are apart in a file, and sums over heads have another order."""
    architecture, class_name, options = CASES[case]
    checkpoint = tmp_path / "checkpoint"
    save_random_model(class_name, {"initializer_range": 0.3} | WIDE | options | {"linear_num_key_heads": 2}, checkpoint)
    write_gguf(checkpoint, tmp_path / "model.gguf", architecture)
    ours, expected = complete(open_gguf_folder(tmp_path / "model.gguf")), complete(checkpoint)
    assert ours.token_ids == expected.token_ids
    for one, other in zip(ours.logprobs, expected.logprobs, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=gap(checkpoint))


def test_layers_that_predict_several_tokens_are_left_out(tmp_path: Path) -> None:
    make("qwen35", tmp_path)

    def add_layer(writer: GGUFWriter) -> None:
        writer.kv_data[0]["qwen35.block_count"].value = 5
        writer.add_uint32("qwen35.nextn_predict_layers", 1)
        writer.add_tensor("blk.4.attn_norm.weight", np.ones(96, np.float32))

    write_gguf(tmp_path / "checkpoint", tmp_path / "more.gguf", "qwen35", change=add_layer)
    ours, expected = (complete(open_gguf_folder(tmp_path / f"{name}.gguf")) for name in ("more", "model"))
    assert ours.logprobs == expected.logprobs


def test_sizes_of_a_delta_rule_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    make("qwen3next", tmp_path)
    for name, value, message in (
        ("ssm.inner_size", 127, "4 value heads .* do not divide ssm.inner_size, 127"),
        ("full_attention_interval", 0, "full_attention_interval is 0, which is not supported; it must be at least 1"),
    ):

        def change(writer: GGUFWriter, name: str = name, value: int = value) -> None:
            writer.kv_data[0][f"qwen3next.{name}"].value = value

        write_gguf(tmp_path / "checkpoint", tmp_path / "model.gguf", "qwen3next", change=change)
        with pytest.raises(EngineError, match=message):
            open_gguf_folder(tmp_path / "model.gguf")


def test_matrices_of_latents_may_be_in_blocks(tmp_path: Path) -> None:
    _, file = make("deepseek_v3", tmp_path, GGMLQuantizationType.Q8_0)
    weights = GgufWeights([file])
    found = weights.take("model.layers.1.self_attn.k_b_proj.weight", 6, 32, 32)
    (tensor,) = (one for one in gguf.GGUFReader(file).tensors if one.name == "blk.1.attn_k_b.weight")
    assert torch.equal(found, torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type)))
    assert complete(open_gguf_folder(file)).token_ids


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"expert_gating_func": 4}, "expert_gating_func is 4, which is not supported; it must be 1 or 2"),
        (
            {"rope.scaling.yarn_log_multiplier": 0.0},
            "yarn_log_multiplier is 0, which is not supported; it must be a te",
        ),
        ({"attention.key_length": 50}, "attention.key_length is 50, which is not supported; it must be 40"),
    ],
)
def test_keys_of_latent_attention_that_do_not_fit_are_refused(
    keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    make("deepseek_v3", tmp_path)

    def change(writer: GGUFWriter) -> None:
        for name, value in keys.items():
            writer.kv_data[0][f"deepseek2.{name}"].value = value

    write_gguf(tmp_path / "checkpoint", tmp_path / "model.gguf", "deepseek2", change=change)
    with pytest.raises(EngineError, match=message):
        open_gguf_folder(tmp_path / "model.gguf")


def test_an_olmo_without_windows_is_refused_in_one_line(tmp_path: Path) -> None:
    _, file = make("olmo3", tmp_path)
    content = file.read_bytes().replace(b"olmo2.attention.sliding_window\x04", b"olmo2.attention.sliding_wind__\x04")
    file.write_bytes(content.replace(b"sliding_window_pattern", b"sliding_wind___pattern"))
    with pytest.raises(EngineError, match="is an OLMo 2, which is not supported as a GGUF file; OLMo 3 is") as error:
        open_gguf_folder(file)
    assert "\n" not in str(error.value)


def test_layers_without_keys_are_those_with_convolutions_or_refused(tmp_path: Path) -> None:
    _, file = make("lfm2", tmp_path)
    assert [layer.window for layer in decoder_config(read_raw_config(open_gguf_folder(file))).attention] == [None]
    folder = tmp_path / "checkpoint"
    write_gguf(folder, file, "lfm2", change=lambda writer: change_kv_heads(writer, [0, 2, 4]))
    with pytest.raises(
        EngineError, match=r"head_count_kv is \[0, 2, 4\], which is not supported; it must be 0 and one"
    ):
        open_gguf_folder(file)


def change_kv_heads(writer: GGUFWriter, numbers: list[int]) -> None:
    for fields in writer.kv_data:
        fields["lfm2.attention.head_count_kv"].value = numbers


def test_llama_3s_scaled_positions_are_read_from_their_divisors(tmp_path: Path) -> None:
    """llama.cpp's conversion stores a divisor for each frequency instead of the parameters."""
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    options = WIDE | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 10_000.0} | scaling}
    save_random_model("LlamaForCausalLM", options, tmp_path / "checkpoint")
    (rope, *_) = decoder_config(read_raw_config(tmp_path / "checkpoint")).ropes
    expected = rope.tables(256)
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](AutoConfig.from_pretrained(tmp_path / "checkpoint"), None)
    unscaled = 10_000.0 ** -(torch.arange(0, 16, 2) / 16)

    def add_divisors(writer: GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", (unscaled / frequencies).numpy())

    write_gguf(tmp_path / "checkpoint", tmp_path / "model.gguf", "llama", change=add_divisors)
    (rope, *_) = decoder_config(read_raw_config(open_gguf_folder(tmp_path / "model.gguf"))).ropes
    # A frequency of at most 1 has some roundings more, which an angle multiplies by its position.
    torch.testing.assert_close(rope.tables(256), expected, rtol=0, atol=4 * EPS * 256)


@pytest.mark.parametrize("case", ["llama", "gemma3"])
def test_quantised_files_have_the_weights_that_transformers_reads(case: str, tmp_path: Path) -> None:
    _, file = make(case, tmp_path, GGMLQuantizationType.Q8_0)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
    weights = GgufWeights(weight_files(open_gguf_folder(file)))
    for name, expected in model.state_dict().items():
        if weights.has(name):
            if expected.ndim == 2:
                rows, columns = expected.shape
                read = dense(weights.take_matrix(name.removesuffix(".weight"), rows, columns))
            else:
                read = weights.take(name, *expected.shape)
            assert torch.equal(read, expected), name
    weights.finish()


def test_groups_of_four_bits_have_the_same_values_as_their_blocks(tmp_path: Path) -> None:
    _, file = make("qwen2", tmp_path, GGMLQuantizationType.Q4_0)
    weights = GgufWeights([file])
    blocks = weights.take_matrix("model.layers.0.mlp.down_proj", 96, 128)
    assert isinstance(blocks, BlockMatrix)
    matrix = blocks.to_gpu_matrix()
    assert isinstance(matrix, GroupedMatrix)
    reader = gguf.GGUFReader(file)
    (tensor,) = (tensor for tensor in reader.tensors if tensor.name == "blk.0.ffn_down.weight")
    assert torch.equal(matrix.dense(), torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type)))


def test_a_block_type_that_is_not_supported_is_refused_by_name(tmp_path: Path) -> None:
    folder, file = make("qwen2", tmp_path)

    def add_strange_tensor(writer: GGUFWriter) -> None:
        kind = GGMLQuantizationType.TQ1_0
        _, size = gguf.GGML_QUANT_SIZES[kind]
        writer.add_tensor("strange.weight", np.zeros((1, size), np.uint8), raw_dtype=kind)

    write_gguf(folder, file, "qwen2", change=add_strange_tensor)
    with pytest.raises(EngineError, match=r"'strange\.weight' is TQ1_0; supported are BF16"):
        GgufWeights([file])


def load_and_read_log(folder: Path, caplog: pytest.LogCaptureFixture, device_config: DeviceConfig = CPU) -> list[str]:
    caplog.clear()
    load_model(folder, lambda config: config.max_context, device_config)
    return [record.getMessage() for record in caplog.records]


def test_a_gpu_says_once_which_blocks_it_dequantises(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, file = make("qwen2", tmp_path, GGMLQuantizationType.Q8_0)
    [line] = load_and_read_log(open_gguf_folder(file), caplog, EMULATED_GPU)
    assert line.endswith("blocks of Q8_0 are dequantised to float32; on a GPU only Q4_0, MXFP4, NVFP4 keep their bits")
    _, file = make("qwen3", tmp_path / "other", GGMLQuantizationType.Q4_0)
    assert load_and_read_log(open_gguf_folder(file), caplog, EMULATED_GPU) == []


@pytest.mark.skipif(not blocks.is_supported(), reason="needs AVX2 or ARM's dot products")
def test_kernels_that_are_not_in_the_compile_cache_are_announced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, file = make("qwen2", tmp_path, GGMLQuantizationType.Q8_0)
    folder = open_gguf_folder(file)
    product_kernel("Q8_0").compile()
    assert load_and_read_log(folder, caplog) == []
    monkeypatch.setattr(kernel, "_CACHE", tmp_path)
    [line] = load_and_read_log(folder, caplog)
    assert line.endswith("compiling kernels for blocks of Q8_0; once, some seconds each")


def test_a_link_to_a_file_has_the_probe_beside_the_link(tmp_path: Path) -> None:
    _, file = make("llama", tmp_path)
    link = tmp_path / "links" / "model.gguf"
    link.parent.mkdir()
    link.symlink_to(file)
    probe = plant_probe(open_gguf_folder(link), link.with_suffix(".probe"))
    assert Harness(open_gguf_folder(link)).core.model.info.probe == probe.info
    assert Harness(open_gguf_folder(file)).core.model.info.probe is None
