"Small configurations of every family of language models that transformers has, each with several forms of rotary positions."

import contextlib
import io

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, logging
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from mixsd_nb.models.accepted import _AFTER_HEAD

SMALL = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=8, vocab_size=96,
    max_position_embeddings=256, sliding_window=16, num_experts=4, num_local_experts=4, n_routed_experts=4, num_experts_per_tok=2,
    moe_intermediate_size=16, shared_expert_intermediate_size=16, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8,
    qk_head_dim=16, v_head_dim=8, n_group=1, topk_group=1, n_shared_experts=1, first_k_dense_replace=1, moe_num_experts=4, moe_k=2, pad_token_id=0,
    bos_token_id=1, eos_token_id=2, attention_chunk_size=16, attention_hidden_size=32, intermediate_size_mlp=48, moe_layer_start_index=1,
    moe_layer_end_index=3, hidden_size_per_layer_input=8, vocab_size_per_layer_input=96, laurel_rank=4, num_kv_shared_layers=0)
PERIOD = 777_777.0
_FACTORS = [1.0 + k / 4 for k in range(4)]
POSITIONS = {  # forms of scaling; `longrope` has one factor for each pair of coordinates of a head
    "default": dict(rope_type="default"), "linear": dict(rope_type="linear", factor=4.0), "dynamic": dict(rope_type="dynamic", factor=2.0),
    "yarn": dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64),
    "llama3": dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32),
    "longrope": dict(rope_type="longrope", short_factor=_FACTORS, long_factor=_FACTORS[::-1], original_max_position_embeddings=64)}


def small_config(family, form="default"):
    "The configuration of a small model, with an unusual period of its positions where it has any; errors as of transformers."
    default = CONFIG_MAPPING[family]()
    given = {name: value for name, value in SMALL.items() if hasattr(default, name)}
    if "qk_rope_head_dim" in given: given["num_key_value_heads"] = given["num_attention_heads"]  # latent attention
    if getattr(default, "layer_types", None): given["layer_types"] = _cut(default.layer_types, 4)
    rope = getattr(default, "rope_parameters", None)
    if rope and "rope_theta" in rope:
        parts = {k: v for k, v in rope.items() if k == "partial_rotary_factor"}
        given["rope_parameters"] = dict(POSITIONS[form], rope_theta=PERIOD) | parts
        if form == "dynamic" and "hunyuan" in family: given["rope_parameters"]["alpha"] = 1000.0
        pairs = int(SMALL["head_dim"] * parts.get("partial_rotary_factor", 1)) // 2
        if form == "longrope": given["rope_parameters"] |= {name: POSITIONS[form][name][:pairs] for name in ("short_factor", "long_factor")}
        if form == "longrope" and hasattr(default, "original_max_position_embeddings"): given["original_max_position_embeddings"] = 64
    elif rope:
        kinds = {kind: dict(one, rope_theta=PERIOD if kind == "full_attention" else one["rope_theta"]) for kind, one in rope.items()}
        kinds["full_attention"] |= POSITIONS[form]
        given["rope_parameters"] = kinds
    return CONFIG_MAPPING[family](**given)


def _cut(kinds, n):
    "The first kinds of layers, the last one being the kind that the whole list has and these have not."
    kept = list(kinds[:n])
    missing = [kind for kind in kinds if kind not in kept]
    return [*kept[:-1], missing[0]] if missing else kept


def small_model(config, seed=0):
    "A random model whose logits depend on the positions."
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1: p.normal_(std=p.shape[-1] ** -0.5 * 1.5)
    return model


def list_families():
    "The families that the package accepts, and that have positions."
    found = []
    logging.set_verbosity(logging.CRITICAL)
    for family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        with contextlib.suppress(Exception), contextlib.redirect_stderr(io.StringIO()):
            config = small_config(family)
            if config.get_text_config() is not config or not getattr(config, "rope_parameters", None): continue
            with torch.device("meta"): model = AutoModelForCausalLM.from_config(config)
            if any(getattr(config, name, None) not in (None, neutral) for name, neutral in _AFTER_HEAD.items()): continue
            small = sum(p.numel() for p in model.parameters()) < 1_000_000
            if hasattr(model, "model") and hasattr(model, "lm_head") and small: found.append(family)
    return found
