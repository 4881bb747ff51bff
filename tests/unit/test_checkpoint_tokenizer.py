"""Tokenizers of folders and of GGUF metadata, with templates, special tokens and stop ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from server.checkpoint.checkpoint import Checkpoint
from server.checkpoint.gguf_pretokenizers import PRE_TOKENIZATIONS, make_pre_tokenizer
from server.checkpoint.tokenizer import load_tokenizer
from server.errors import UserError

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = [*BYTES, "<s>", "</s>", "<|user|>", "he", "ll", "hell", "Ġhe"]
BOS, EOS, USER = len(BYTES), len(BYTES) + 1, len(BYTES) + 2
MERGES = ["h e", "l l", "he ll", "Ġ he"]


def checkpoint(path: Path, kind: Any = "safetensors", config: Any = None, generation: Any = None) -> Checkpoint:
    return Checkpoint(path, kind, config or {}, generation or {}, "test", "hash")


def write_tokenizer(folder: Path, **config: Any) -> Tokenizer:
    vocabulary = {token: index for index, token in enumerate(TOKENS)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [tuple(merge.split(" ")) for merge in MERGES]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<s>", "</s>", "<|user|>")])
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8, pad_id=0)
    tokenizer.save(str(folder / "tokenizer.json"))
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return tokenizer


def test_a_folder(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, bos_token="<s>", eos_token={"content": "</s>", "special": True}, pad_token=None)
    files = load_tokenizer(checkpoint(tmp_path))
    assert files.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert files.eos_token_ids == (EOS,)
    assert files.special_ids == {BOS, EOS, USER}
    assert files.chat_templates == {}
    assert files.kind == "BPE (tokenizer.json)"


def test_saved_truncation_and_padding_are_off(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    tokenizer = load_tokenizer(checkpoint(tmp_path)).tokenizer
    assert len(tokenizer.encode("x" * 50).ids) == 51
    assert len(tokenizer.encode("x").ids) == 2


def test_the_post_processor_decides_on_bos_not_the_config(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, add_bos_token=False)
    tokenizer = load_tokenizer(checkpoint(tmp_path)).tokenizer
    assert tokenizer.encode("hell").ids == [BOS, TOKENS.index("hell")]
    assert tokenizer.encode("hell", add_special_tokens=False).ids == [TOKENS.index("hell")]


def test_all_stop_ids_count(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, eos_token="</s>")
    files = load_tokenizer(checkpoint(tmp_path, config={"eos_token_id": 9}, generation={"eos_token_id": [5, 9, 7]}))
    assert files.eos_token_ids == (5, 9, 7, EOS)
    assert load_tokenizer(checkpoint(tmp_path, config={"eos_token_id": None})).eos_token_ids == (EOS,)


@pytest.mark.parametrize("value", ["2", -1, True, [1, None], 1.5])
def test_stop_ids_that_are_none(tmp_path: Path, value: Any) -> None:
    write_tokenizer(tmp_path)
    with pytest.raises(UserError, match="eos_token_id"):
        load_tokenizer(checkpoint(tmp_path, generation={"eos_token_id": value}))


def test_the_legacy_map_counts_only_without_added_tokens(tmp_path: Path) -> None:
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "<|user|>"}')
    write_tokenizer(tmp_path, eos_token="</s>")
    assert load_tokenizer(checkpoint(tmp_path)).eos_token_ids == (USER,)
    write_tokenizer(tmp_path, eos_token="</s>", added_tokens_decoder={})
    assert load_tokenizer(checkpoint(tmp_path)).eos_token_ids == (EOS,)


def test_templates_by_strength(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, chat_template="from config")
    (tmp_path / "chat_template.json").write_text('{"chat_template": "legacy"}')
    assert load_tokenizer(checkpoint(tmp_path)).chat_templates == {"default": "from config"}
    (tmp_path / "chat_template.jinja").write_text("from file ü")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("with tools")
    assert load_tokenizer(checkpoint(tmp_path)).chat_templates == {"default": "from file ü", "tool_use": "with tools"}


def test_a_list_of_templates(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "a"}, {"name": "rag", "template": "b"}]
    write_tokenizer(tmp_path, chat_template=named)
    assert load_tokenizer(checkpoint(tmp_path)).chat_templates == {"default": "a", "rag": "b"}
    write_tokenizer(tmp_path, chat_template=[{"name": "default"}])
    with pytest.raises(UserError, match="no name and template"):
        load_tokenizer(checkpoint(tmp_path))
    write_tokenizer(tmp_path, chat_template=3)
    with pytest.raises(UserError, match="a text or a list, not int"):
        load_tokenizer(checkpoint(tmp_path))


def test_folders_without_a_usable_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no tokenizer\.json; name another tokenizer with --tokenizer"):
        load_tokenizer(checkpoint(tmp_path))
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(UserError, match=r"tokenizer\.model alone is not supported"):
        load_tokenizer(checkpoint(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"tokenizer\.json is not a usable tokenizer"):
        load_tokenizer(checkpoint(tmp_path))


def test_another_tokenizer(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    write_tokenizer(other, eos_token="</s>")
    files = load_tokenizer(checkpoint(tmp_path, generation={"eos_token_id": 3}), str(other))
    assert files.eos_token_ids == (3, EOS)
    with pytest.raises(UserError, match="does not exist"):
        load_tokenizer(checkpoint(tmp_path), "./nowhere")


def write_gguf(file: Path, **changes: Any) -> Checkpoint:
    keys: dict[str, Any] = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": TOKENS,
        "token_type": [1] * len(BYTES) + [3, 3, 4] + [1] * 4,
        "merges": MERGES,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
    }
    writer = gguf.GGUFWriter(file, "llama")
    for key, value in (keys | changes).items():
        name = key if key.startswith("tokenizer.") else f"tokenizer.ggml.{key}"
        match value:
            case bool():
                writer.add_bool(name, value)
            case int():
                writer.add_uint32(name, value)
            case str():
                writer.add_string(name, value)
            case list():
                writer.add_array(name, value)
    writer.add_tensor("t", np.zeros(1, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return checkpoint(file, "gguf")


def test_gguf(tmp_path: Path) -> None:
    files = load_tokenizer(write_gguf(tmp_path / "m.gguf", eot_token_id=USER))
    assert files.tokenizer.encode("<s>hell he<|user|>").ids == [BOS, TOKENS.index("hell"), TOKENS.index("Ġhe"), USER]
    assert files.eos_token_ids == (EOS, USER)
    assert files.special_ids == {BOS, EOS}
    assert files.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert files.kind == "byte-level BPE (gpt-2)"


@pytest.mark.parametrize(
    ("pre", "flag", "adds"),
    [("gpt-2", None, False), ("gpt-2", True, True), ("llama-bpe", None, True), ("llama-bpe", False, False)],
)
def test_gguf_bos(tmp_path: Path, pre: str, flag: bool | None, adds: bool) -> None:
    tokenizer = load_tokenizer(write_gguf(tmp_path / "m.gguf", pre=pre, add_bos_token=flag)).tokenizer
    assert tokenizer.encode("he").ids == [BOS] * adds + [TOKENS.index("he")]
    assert tokenizer.encode("he", add_special_tokens=False).ids == [TOKENS.index("he")]


def test_gguf_templates(tmp_path: Path) -> None:
    named = {"tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": "tools"}
    named |= {"tokenizer.chat_templates": ["tool_use"]}
    files = load_tokenizer(write_gguf(tmp_path / "m.gguf", **named))
    assert files.chat_templates == {"default": "plain", "tool_use": "tools"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "bert"}, "'bert' is not supported; gpt2"),
        ({"model": None}, "None is not supported"),
        ({"pre": "viking"}, "pre-tokeniser 'viking' is not known; known are default, smollm"),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokens": list(range(9))}, "tokenizer.ggml.tokens is missing or no list of str"),
        ({"tokens": TOKENS[:-1] + ["he"]}, "1 of its tokens occur twice"),
        ({"token_type": [1, 1]}, "tokenizer.ggml.token_type has 2 entries for"),
        ({"merges": ["h e", "x"]}, "the merge 'x' joins or gives something that is no token"),
        ({"merges": ["x y"]}, "the merge 'x y' joins or gives"),
        ({"merges": None}, "tokenizer.ggml.merges is missing"),
        ({"eos_token_id": 10**6}, "tokenizer.ggml.eos_token_id is 1000000, but there are"),
        ({"bos_token_id": "<s>"}, "tokenizer.ggml.bos_token_id is '<s>'"),
    ],
)
def test_gguf_refusals(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        load_tokenizer(write_gguf(tmp_path / "m.gguf", **changes))
    assert "m.gguf" in str(caught.value)


def pieces(name: str, text: str) -> list[str]:
    cut = make_pre_tokenizer(PRE_TOKENIZATIONS[name].patterns)
    return [text[slice(*span)] for _, span in cut.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("smollm", "it's 2024, a12", ["it", "'s", " ", "2", "0", "2", "4", ",", " a", "1", "2"]),
        ("gpt-2", "it's 2024, a12", ["it", "'s", " 2024", ",", " a", "12"]),
        ("llama-bpe", "IT'S 2024\n\n x", ["IT", "'S", " ", "202", "4", "\n\n", " x"]),
        ("qwen2", "IT'S 2024\n\n x", ["IT", "'S", " ", "2", "0", "2", "4", "\n\n", " x"]),
        ("glm4", "x=12345;", ["x", "=", "123", "45", ";"]),
        ("tekken", "camelCase 12/\n", ["camel", "Case", " ", "1", "2", "/\n"]),
        ("default", "a$b 12345", ["a", "$", "b", " ", "123", "45"]),
    ],
)
def test_where_text_is_cut(name: str, text: str, expected: list[str]) -> None:
    assert pieces(name, text) == expected


@pytest.mark.parametrize("name", PRE_TOKENIZATIONS)
def test_cutting_loses_nothing(name: str) -> None:
    text = "A b1234  c\t\r\n\n'LL I'm ½ 日本 é 😀$+<=>^~| end  "
    assert "".join(pieces(name, text)) == text


SP_TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "h", "e", "l", "o", "he", "ll"]
SP_TOKENS += ["▁he", "llo", "hello", "▁hello"]


def sentencepiece(file: Path, **changes: Any) -> Checkpoint:
    scores = [0.0] * 259 + [-float(rank) for rank in (20, 21, 22, 23, 24, 2, 1, 4, 3, 6, 5)]
    types = [2, 3, 3] + [6] * 256 + [1] * 11
    keys = {"model": "llama", "tokens": SP_TOKENS, "scores": scores, "token_type": types, "merges": None, "pre": None}
    return write_gguf(file, **keys | {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0} | changes)


def test_sentencepiece(tmp_path: Path) -> None:
    files = load_tokenizer(sentencepiece(tmp_path / "m.gguf"))
    ids = files.tokenizer.encode("hello he").ids
    assert [SP_TOKENS[index] for index in ids] == ["<s>", "▁hello", "▁he"]
    assert files.tokenizer.decode(ids) == "hello he"
    assert files.kind == "SentencePiece BPE"


def test_sentencepiece_writes_the_rest_as_bytes(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(
        sentencepiece(tmp_path / "m.gguf", add_bos_token=False, add_space_prefix=False)
    ).tokenizer
    ids = tokenizer.encode("heé😀").ids
    assert [SP_TOKENS[index] for index in ids[:3]] == ["he", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(ids) == "heé😀"
