"""The keys of the published config.json: what each means here, which must have one value, and which choose nothing."""

from __future__ import annotations

from typing import Any

# Same name and meaning in `ModelConfig`. "always": required; "moe": required where there are experts; "": None = off.
SAME: dict[str, str] = {
    "vocab_size": "always",
    "hidden_size": "always",
    "num_hidden_layers": "always",
    "intermediate_size": "always",
    "num_attention_heads": "always",
    "q_lora_rank": "",
    "kv_lora_rank": "always",
    "qk_nope_head_dim": "always",
    "qk_rope_head_dim": "always",
    "v_head_dim": "always",
    "mla_use_output_gate": "",
    "rms_norm_eps": "always",
    "initializer_range": "",
    "tie_word_embeddings": "",
    "hidden_act": "always",
    "activation_situ_beta": "",
    "activation_situ_linear_beta": "",
    "attn_res_block_size": "",
    "num_experts": "",
    "num_experts_per_token": "moe",
    "num_shared_experts": "moe",
    "moe_intermediate_size": "moe",
    "routed_expert_hidden_size": "",
    "latent_moe_use_norm": "",
    "moe_renormalize": "moe",
    "routed_scaling_factor": "moe",
    "first_k_dense_replace": "moe",
}

# Keys of linear_attn_config and their fields.
RENAMED = {
    "kda_layers": "kda_layers",
    "full_attn_layers": "full_attn_layers",
    "head_dim": "kda_head_dim",
    "num_heads": "kda_num_heads",
    "short_conv_kernel_size": "short_conv_kernel_size",
    "gate_lower_bound": "gate_lower_bound",
    "use_full_rank_gate": "use_full_rank_gate",
}

# Text keys with the only values that this model is.
FIXED: dict[str, tuple[Any, ...]] = {
    "model_type": ("kimi_linear",),
    "attention_bias": (False,),
    "mla_use_nope": (True,),
    "moe_router_activation_func": ("sigmoid",),
    "num_expert_group": (1,),
    "topk_group": (1,),
    "moe_layer_freq": (1,),
    "topk_method": ("noaux_tc",),
    "use_grouped_topk": (True, False),  # one group: nothing to choose
    "num_nextn_predict_layers": (0,),
}

# Keys of any part that choose nothing in the architecture: identity, ids, and what transformers writes into every config. The
# rotary ones among them turn nothing in a model without position encoding.
INERT = frozenset(
    """_name_or_path add_cross_attention architectures attention_dropout auto_map bad_words_ids
    begin_suppress_tokens bos_token_id chunk_size_feed_forward cross_attention_hidden_size decoder_start_token_id
    diversity_penalty do_sample dtype early_stopping eos_token_id finetuning_task forced_bos_token_id
    forced_eos_token_id head_dim id2label is_decoder is_encoder_decoder label2id length_penalty max_length
    max_position_embeddings min_length model_max_length no_repeat_ngram_size num_beam_groups num_beams
    num_return_sequences output_attentions output_hidden_states output_scores pad_token_id prefix pretraining_tp
    problem_type pruned_heads remove_invalid_values repetition_penalty return_dict return_dict_in_generate
    rope_parameters rope_scaling rope_theta sep_token_id suppress_tokens task_specific_params temperature tf_legacy_loss
    tie_encoder_decoder tokenizer_class top_k top_p torch_dtype torchscript transformers_version typical_p
    use_bfloat16 use_cache""".split()  # noqa: SIM905 (a word list reads better)
)
INERT_PREFIXES = ("encoder_no_repeat_", "exponential_decay_")

INERT_TOP = frozenset(("ignore_index", "image_placeholder", "model_type", "tie_word_embeddings"))

# What a file written from a `ModelConfig` says beside it.
FRESH_TEXT: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "mla_use_nope": True,
    "moe_router_activation_func": "sigmoid",
    "num_expert_group": 1,
    "topk_group": 1,
    "moe_layer_freq": 1,
    "topk_method": "noaux_tc",
    "use_grouped_topk": True,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": None,
    "tie_word_embeddings": False,
    "bos_token_id": 163584,
    "eos_token_id": 163586,
    "pad_token_id": 163839,
    "dtype": "bfloat16",
    "use_cache": True,
}
FRESH_TOP: dict[str, Any] = {
    "architectures": ["KimiK3ForConditionalGeneration"],
    "model_type": "kimi_k3",
    "bos_token_id": 163584,
    "eos_token_id": 163586,
    "pad_token_id": 163839,
    "ignore_index": -100,
    "image_placeholder": "<|kimi_image_placeholder|>",
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}

# Keys of vision_config and the fields of `VisionConfig`.
VISION = {
    "patch_size": "patch_size",
    "vt_hidden_size": "hidden_size",
    "vt_intermediate_size": "intermediate_size",
    "vt_num_attention_heads": "num_attention_heads",
    "vt_num_hidden_layers": "num_hidden_layers",
    "qkv_hidden_size": "qkv_hidden_size",
    "init_pos_emb_height": "pos_emb_height",
    "init_pos_emb_width": "pos_emb_width",
    "init_pos_emb_time": "pos_emb_time",
    "merge_kernel_size": "merge_kernel",
    "projector_ln_eps": "projector_eps",
}

# Vision keys with the only values that this tower is.
VISION_FIXED: dict[str, Any] = {
    "_attn_implementation": "flash_attention_2",
    "activation_func": "gelu_pytorch_tanh",
    "attn_bias": False,
    "linear_bias": False,
    "merge_type": "sd2_tpool",
    "mlp_type": "mlp2",
    "mm_projector_type": "patchmergerv2",
    "norm_type": "rmsnorm",
    "patch_embed_proj_bias": False,
    "pos_emb_interpolation_mode": "bilinear",
    "pos_emb_type": "divided_fixed",
    "projector_hidden_act": "gelu",
}

# The published description of packed experts. Its patterns leave out less than the checkpoint does (latent projections are
# stored in bfloat16 although no pattern names them), so the loader goes by the tensors.
QUANTIZATION: dict[str, Any] = {
    "config_groups": {
        "group_0": {
            "format": "mxfp4-pack-quantized",
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "group_size": 32,
                "num_bits": 4,
                "observer": "minmax",
                "observer_kwargs": {},
                "scale_dtype": "torch.uint8",
                "strategy": "group",
                "symmetric": True,
                "type": "float",
                "zp_dtype": None,
            },
        }
    },
    "format": "mxfp4-pack-quantized",
    "global_compression_ratio": None,
    "ignore": [
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
        "re:.*lm_head.*",
        "re:.*vision_tower.*",
        "re:.*mm_projector.*",
    ],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}
