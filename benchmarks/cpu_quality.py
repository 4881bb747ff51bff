"""Perplexity of the embedded model as a CPU serves it, beside the same weights dequantised to float32.

python benchmarks/cpu_quality.py [--tokens 20480] [--window 512] [--cpu-weights packed]

The text is Python's own help on its language (`pydoc_data.topics`, PSF licence), which every Python brings along. Both
engines score the same windows as prompts.
"""

from __future__ import annotations

import argparse
import math
from pydoc_data import topics

from server.checkpoint.locate import locate
from server.checkpoint.tokenizer import load_tokenizer
from server.config import Settings
from server.engine.in_process import InProcessEngine


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=20480)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--cpu-weights", choices=("auto", "packed", "16bit"), default="packed")
    args = parser.parse_args()
    windows = text_windows(args.tokens, args.window)
    exact = perplexity({"dtype": "float32"}, windows)
    served = perplexity({"cpu_weights": args.cpu_weights}, windows)
    print(f"{len(windows)} windows of {args.window} tokens")
    print(f"float32, dequantised: {exact:.4f}")
    print(f"bfloat16, --cpu-weights {args.cpu_weights}: {served:.4f} ({100 * (served / exact - 1):+.3f} %)")


def text_windows(tokens: int, window: int) -> list[list[int]]:
    """Windows spread evenly over the text."""
    text = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    ids = load_tokenizer(locate(None)).tokenizer.encode(text, add_special_tokens=False).ids
    count = tokens // window
    apart = (len(ids) - window) // max(1, count - 1)
    return [ids[i * apart : i * apart + window] for i in range(count)]


def perplexity(settings: dict[str, str], windows: list[list[int]]) -> float:
    """exp of the mean negative log-probability of all tokens but each window's first."""
    engine = InProcessEngine(Settings.model_validate(settings | {"enable_prefix_caching": False}))
    scores: list[float] = []
    for window in windows:
        (outputs,) = engine.generate([window], 1, prompt_logprobs=0).outputs
        scores += [entry.logprob for output in outputs for entry in output.prompt_logprobs or () if entry]
    assert len(scores) == sum(len(window) - 1 for window in windows)
    return math.exp(-sum(scores) / len(scores))


if __name__ == "__main__":
    main()
