"""A tiny Llama with random weights and a byte-level BPE tokenizer, written as a model folder."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
EOS = "<|im_end|>"
VOCAB_SIZE = 384
LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 2, 64, 4, 2, 16, 96
MAX_LENGTH = 65536
_CORPUS = ["The capital of France is Paris. Sam has 12 apples, 漢字 and 日本語 too. Ünïcödé naïve café 🙂 🤖."] * 4


def write_tiny_llama(folder: Path, seed: int = 0) -> Path:
    """Weights large enough that greedy answers wander through the vocabulary."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, scale: float) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * scale

    tensors = {
        "model.embed_tokens.weight": random(VOCAB_SIZE, HIDDEN, scale=1.0),
        "model.norm.weight": 1 + random(HIDDEN, scale=0.1),
        "lm_head.weight": random(VOCAB_SIZE, HIDDEN, scale=0.4),
    }
    shapes = {
        "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
        "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
        "mlp.up_proj": (INTERMEDIATE, HIDDEN),
        "mlp.down_proj": (HIDDEN, INTERMEDIATE),
    }
    for layer in range(LAYERS):
        for name, shape in shapes.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = random(*shape, scale=2.0 / shape[1] ** 0.5)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = 1 + random(HIDDEN, scale=0.1)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer = tiny_tokenizer()
    eos = tokenizer.token_to_id(EOS)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": MAX_LENGTH,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": eos,
    }
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer.save(str(folder / "tokenizer.json"))
    texts = {"eos_token": EOS, "chat_template": CHAT_TEMPLATE, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(texts))
    return folder


def tiny_tokenizer() -> Tokenizer:
    """Byte-level BPE; every id of the model's vocabulary is a token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=["<|im_start|>", EOS],
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.add_tokens([f"<{i}>" for i in range(VOCAB_SIZE - tokenizer.get_vocab_size())])
    return tokenizer
