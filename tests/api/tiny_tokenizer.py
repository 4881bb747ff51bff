"""Small tokenizers of the two kinds that models have, made on the spot."""

from __future__ import annotations

from functools import lru_cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from server.checkpoint.tokenizer import TokenizerFiles

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIALS = ("<|bos|>", "<|im_start|>", "<|im_end|>")
CORPUS = [
    "The capital of France is Paris. Sam has 12 apples and 7 pears, 漢字 and 日本語 too.",
    "Hello world, hello there! Ünïcödé naïve café 🙂 emoji 🤖 and more words and more text.",
    "7) Sam has 12\n\n8) The answer is 42. What is the answer? It is the answer of the world.",
] * 4


@lru_cache
def byte_level(bos: bool = False) -> TokenizerFiles:
    """Byte-level BPE with a ChatML template; with `bos` the tokenizer puts <|bos|> in front."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=360,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=list(SPECIALS),
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    ids = {name: tokenizer.token_to_id(name) for name in SPECIALS}
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|bos|> $A", special_tokens=[("<|bos|>", ids["<|bos|>"])]
        )
    return TokenizerFiles(
        tokenizer=tokenizer,
        chat_templates={"default": CHAT_TEMPLATE},
        special_tokens={"bos_token": "<|bos|>", "eos_token": "<|im_end|>"},
        eos_token_ids=(ids["<|im_end|>"],),
        special_ids=frozenset(ids.values()),
        kind="tiny byte-level BPE",
    )


@lru_cache
def sentencepiece() -> TokenizerFiles:
    """BPE with byte fallback and the visible space, as Llama 2 has it; adds <s>."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = [*"▁abcdefghijklmnopqrstuvwxyz.,!?TH"]
    vocab = {piece: i for i, piece in enumerate([*pieces, *letters, "▁a", "▁t", "▁th", "▁the", "he", "▁he", "ll"])}
    merges = [("▁", "a"), ("▁", "t"), ("▁t", "h"), ("h", "e"), ("▁t", "he"), ("▁", "he"), ("l", "l"), ("▁th", "e")]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return TokenizerFiles(
        tokenizer=tokenizer,
        chat_templates={},
        special_tokens={"bos_token": "<s>", "eos_token": "</s>"},
        eos_token_ids=(2,),
        special_ids=frozenset({0, 1, 2}),
        kind="tiny SentencePiece BPE",
    )
