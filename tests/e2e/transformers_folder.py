"""The embedded model as a folder in transformers' layout: fp32 safetensors, config and tokenizer.

python tests/e2e/transformers_folder.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

from oracle import smollm2_model
from transformers import PreTrainedTokenizerFast

from server.checkpoint.locate import locate
from server.checkpoint.tokenizer import load_tokenizer


def write_smollm2(folder: Path) -> None:
    """Write it; the folder is made."""
    smollm2_model().save_pretrained(folder)
    files = load_tokenizer(locate(None))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=files.tokenizer, **files.special_tokens)
    tokenizer.chat_template = files.chat_templates["default"]
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    write_smollm2(Path(sys.argv[1]))
