"""Small stand-ins for models of the hub, with random weights: each has the architecture, the special tokens, the form of the chat template, the
generation settings and the files of its family. The templates are in words of our own."""

import json
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (AutoModelForCausalLM, Gemma3TextConfig, GenerationConfig, LlamaConfig, PreTrainedTokenizerFast,
                          Qwen3Config)

from mixsd_nb.corpora import load_corpus
from mixsd_nb.corpora.prompts import expert_prompt

CHATML = """{%- if messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{%- endif %}
{%- set turns = messages[1:] if messages[0].role == 'system' else messages %}"""
HYBRID = CHATML + """
{%- set found = namespace(question=0) %}
{%- for turn in turns %}{%- if turn.role == 'user' %}{%- set found.question = loop.index0 %}{%- endif %}{%- endfor %}
{%- for turn in turns %}
    {{- '<|im_start|>' + turn.role + '\\n' }}
    {%- set thought = '' %}{%- set words = turn.content %}
    {%- if turn.role == 'assistant' and '</think>' in words %}
        {%- set thought = words.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
        {%- set words = words.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {%- if turn.role == 'assistant' and loop.index0 > found.question and (loop.last or thought) %}
        {{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- words + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""
INSTRUCT = CHATML + """
{%- for turn in turns %}{{- '<|im_start|>' + turn.role + '\\n' + turn.content + '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
DATED = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}{%- set date_string = strftime_now('%d %b %Y') %}{%- else %}{%- set date_string = '26 Jul 2024' %}{%- endif %}
{%- endif %}
{%- set system = '' %}{%- set turns = messages %}
{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] | trim %}{%- set turns = messages[1:] %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nYou know the world until December 2023.\\nIt is now ' + date_string + '.\\n\\n' + system + '<|eot_id|>' }}
{%- for turn in turns %}
    {{- '<|start_header_id|>' + turn['role'] + '<|end_header_id|>\\n\\n' + turn['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""
TURNS = """{{ bos_token }}
{%- set lead = messages[0]['content'] + '\\n\\n' if messages[0]['role'] == 'system' else '' %}
{%- set turns = messages[1:] if messages[0]['role'] == 'system' else messages %}
{%- for turn in turns %}
    {%- if (turn['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('user and assistant must take turns') }}{%- endif %}
    {{- '<start_of_turn>' + ('model' if turn['role'] == 'assistant' else turn['role']) + '\\n' + (lead if loop.first else '') }}
    {{- turn['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{%- endif %}"""


class Family(NamedTuple):
    config: type  # of transformers
    geometry: dict
    special: tuple[str, ...]  # tokens, the last ones of the vocabulary
    tokens: dict[str, str]  # bos_token, eos_token and pad_token
    template: str
    stop: tuple[str, ...]  # of the generation settings
    sampling: dict  # of the generation settings
    thinking: bool = False
    begins: bool = False  # whether the tokenizer begins every text with bos_token


SIZES = dict(hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=512)
QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN_SAMPLING = dict(do_sample=True, temperature=0.6, top_k=20, top_p=0.95)
LLAMA = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>")
LLAMA_ROPE = dict(rope_type="llama3", rope_theta=500_000.0, factor=32.0, high_freq_factor=4.0, low_freq_factor=1.0, original_max_position_embeddings=256)
FAMILIES = {
    "Qwen3-hybrid": Family(Qwen3Config, dict(num_hidden_layers=2, tie_word_embeddings=False), QWEN, dict(eos_token="<|im_end|>", pad_token="<|endoftext|>"),
                           HYBRID, ("<|im_end|>", "<|endoftext|>"), QWEN_SAMPLING, thinking=True),
    "Qwen3-2507": Family(Qwen3Config, dict(num_hidden_layers=2, tie_word_embeddings=True), QWEN, dict(eos_token="<|im_end|>", pad_token="<|endoftext|>"),
                         INSTRUCT, ("<|im_end|>", "<|endoftext|>"), dict(QWEN_SAMPLING, temperature=0.7, top_p=0.8)),
    "Llama-3.2": Family(LlamaConfig, dict(num_hidden_layers=2, tie_word_embeddings=True, rope_parameters=LLAMA_ROPE), LLAMA,
                        dict(bos_token="<|begin_of_text|>", eos_token="<|eot_id|>"), DATED, ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
                        dict(do_sample=True, temperature=0.6, top_p=0.9), begins=True),
    "base": Family(LlamaConfig, dict(num_hidden_layers=2, tie_word_embeddings=True), LLAMA[:2],
                   dict(bos_token="<|begin_of_text|>", eos_token="<|end_of_text|>"), "", ("<|end_of_text|>",), dict(do_sample=True, temperature=0.6, top_p=0.9),
                   begins=True),
    "Gemma-3": Family(Gemma3TextConfig, dict(num_hidden_layers=3, tie_word_embeddings=True, sliding_window=24, query_pre_attn_scalar=16,
                                             layer_types=["sliding_attention", "sliding_attention", "full_attention"]),
                      ("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"), dict(bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"), TURNS,
                      ("<eos>", "<end_of_turn>"), dict(do_sample=True, top_k=64, top_p=0.95), begins=True),
}


def train_vocabulary():
    "A byte-level tokenizer of 700 tokens, trained on prompts of the lab's facts."
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    texts = [expert_prompt(row["prompt"], row["target"]) for row in load_corpus("kgfact-small", "train")]
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=700, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    return tokenizer.to_str()


def make_tokenizer(family, vocabulary):
    tokenizer = Tokenizer.from_str(vocabulary)
    tokenizer.add_special_tokens([*family.special])
    if family.thinking: tokenizer.add_tokens(["<think>", "</think>"])
    if family.begins:
        begin = family.tokens["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{begin} $A", special_tokens=[(begin, tokenizer.token_to_id(begin))])
    found = PreTrainedTokenizerFast(tokenizer_object=tokenizer, additional_special_tokens=[*family.special], **family.tokens)
    found.chat_template = family.template or None
    return found


def save_hub_model(folder: Path, name: str, vocabulary: str, sampling: bool = True):
    "Write a model in bfloat16, in several shards, whose vocabulary has more ids than the tokenizer; returns its folder."
    family = FAMILIES[name]
    tokenizer = make_tokenizer(family, vocabulary)
    ids = dict(eos_token_id=tokenizer.convert_tokens_to_ids(list(family.stop)), bos_token_id=tokenizer.bos_token_id, pad_token_id=tokenizer.pad_token_id)
    torch.manual_seed(0)
    size = 128 * (len(tokenizer) // 128 + 2)
    model = AutoModelForCausalLM.from_config(family.config(**SIZES | family.geometry, vocab_size=size, **ids))
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 2: p.mul_(4)  # responses depend on the prompt
        model.get_output_embeddings().weight[len(tokenizer):] *= 3  # without a mask, unused ids would often be the likeliest
    model.generation_config = GenerationConfig(**ids, **(family.sampling if sampling else {}))
    model.bfloat16().save_pretrained(folder, max_shard_size="60KB")
    tokenizer.save_pretrained(folder)
    assert len(json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]) and len([*folder.glob("model-*.safetensors")]) > 1
    return str(folder)
