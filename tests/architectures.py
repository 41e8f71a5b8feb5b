"Tiny models of any family of transformers, with random weights, built from the defaults of their configuration."

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

# Sizes under the names that families give them; each family takes those that it has.
SIZES = dict.fromkeys(("hidden_size", "d_model", "n_embd", "word_embed_proj_dim"), 32) | dict.fromkeys(
    ("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim"), 64) | dict.fromkeys(
    ("num_hidden_layers", "num_layers", "n_layer", "encoder_layers", "decoder_layers", "first_k_dense_replace", "num_dense_layers"), 2) | dict.fromkeys(
    ("num_attention_heads", "attention_heads", "n_head", "encoder_attention_heads", "decoder_attention_heads", "num_experts", "num_local_experts",
     "n_routed_experts", "moe_num_experts"), 4) | dict.fromkeys(
    ("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size", "q_lora_rank", "kv_lora_rank"), 16) | dict.fromkeys(
    ("head_dim", "global_head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "hidden_size_per_layer_input"), 8) | dict.fromkeys(
    ("n_group", "topk_group", "n_shared_experts", "num_shared_experts", "bos_token_id"), 1) | dict.fromkeys(
    ("attention_dropout", "attn_pdrop", "resid_pdrop", "dropout", "layerdrop", "router_jitter_noise"), 0.2) | dict(
    num_key_value_heads=2, num_experts_per_tok=2, moe_k=2, max_position_embeddings=512, n_positions=512, sliding_window=6, pad_token_id=0, num_kv_shared_layers=0)
LISTS = ("layer_types", "mlp_layer_types")  # a value for each layer


def tiny_config(family, vocabulary, **options):
    "The configuration of a tiny model of a family, with dropout where the family has it and takes it."
    known = CONFIG_MAPPING[family]().to_dict()
    sizes = {name: size for name, size in SIZES.items() if name in known and not (name == "sliding_window" and known[name] is None)}
    if "qk_rope_head_dim" in sizes: sizes |= dict(num_key_value_heads=4)  # keys and values are compressed instead of shared
    if family == "diffllama": sizes.pop("attention_dropout")
    sizes |= {name: [known[name][0], known[name][-1]] for name in LISTS if known.get(name)}
    return CONFIG_MAPPING[family](**sizes | dict(vocab_size=vocabulary, eos_token_id=2) | options)


def tiny_model(config, scale=3):
    "A model with random weights, in evaluation mode; with a larger scale its states depend more on their neighbours."
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim >= 2: p.mul_(scale)
    return model
