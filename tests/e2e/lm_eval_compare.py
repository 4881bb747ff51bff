"""Score a small multiple-choice task twice with lm_eval: through a server, and with its own `hf` backend.

    python tests/e2e/lm_eval_compare.py FOLDER URL

FOLDER holds the model for transformers, URL is that of a server with the same weights in fp32. Prints one JSON object
with the largest difference of log-likelihoods and how many picks are the same. Needs `pip install "lm_eval[api,hf]"`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

ITEMS = [
    ("The capital of France is", ["Paris", "a kind of cheese", "Berlin"], 0),
    ("Water freezes at a temperature of", ["one hundred degrees", "zero degrees Celsius", "seven apples"], 1),
    ("The opposite of hot is", ["cold", "hot", "a table"], 0),
    ("Two plus two equals", ["five", "four", "twenty-two"], 1),
    ("The sun rises in the", ["west", "east", "kitchen"], 1),
    ("A group of wolves is called a", ["pack", "library", "violin"], 0),
    ("The largest planet of the solar system is", ["Mars", "the Moon", "Jupiter"], 2),
    ("Shakespeare wrote", ["Hamlet", "the theory of relativity", "Faust"], 0),
    ("The chemical symbol of gold is", ["Go", "Au", "Ag"], 1),
    ("Die Hauptstadt von Österreich ist", ["Wien", "Zürich", "東京"], 0),
]
TASK = """\
task: ten_items
dataset_path: json
dataset_kwargs:
  data_files: {test: "FILE"}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: label
target_delimiter: " "
metric_list:
  - metric: acc
"""


def write_task(folder: Path) -> None:
    """A YAML task over a JSON Lines file, both local."""
    lines = [json.dumps({"question": q, "choices": choices, "label": label}) for q, choices, label in ITEMS]
    (folder / "items.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "ten_items.yaml").write_text(TASK.replace("FILE", str(folder / "items.jsonl")))


def likelihoods(model: str, arguments: str, tasks: Path) -> list[list[float]]:
    """Of every choice of every item."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    results: dict[str, Any] = lm_eval.simple_evaluate(
        model=model,
        model_args=arguments,
        tasks=["ten_items"],
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        batch_size=1,
        device="cpu",
        log_samples=True,
        bootstrap_iters=0,
    )
    samples = sorted(results["samples"]["ten_items"], key=lambda sample: sample["doc_id"])
    # One entry per choice: (log-likelihood, whether it is the greedy continuation).
    return [[float(answer[0][0]) for answer in sample["resps"]] for sample in samples]


def main() -> int:
    """0 when both backends agree within 1e-3."""
    folder, url = sys.argv[1:]
    os.environ["HF_DATASETS_OFFLINE"] = os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory() as tasks:
        write_task(Path(tasks))
        name = "SmolLM2-135M-Instruct"
        served = f"model={name},base_url={url}/v1/completions,tokenizer={folder},tokenizer_backend=huggingface"
        ours = likelihoods("local-completions", f"{served},num_concurrent=8,max_retries=1", Path(tasks))
        theirs = likelihoods("hf", f"pretrained={folder},dtype=float32", Path(tasks))
    pairs = [(a, b) for own, other in zip(ours, theirs, strict=True) for a, b in zip(own, other, strict=True)]
    report = {
        "items": len(ours),
        "choices": len(pairs),
        "largest difference": max(abs(a - b) for a, b in pairs),
        "same picks": [max(own) == own[pick(other)] for own, other in zip(ours, theirs, strict=True)].count(True),
        "right": sum(pick(own) == label for own, (_, _, label) in zip(ours, ITEMS, strict=True)),
    }
    sys.stdout.write(json.dumps(report) + "\n")
    return 0 if report["largest difference"] < 1e-3 and report["same picks"] == len(ITEMS) else 1


def pick(values: list[float]) -> int:
    """Index of the most likely choice."""
    return values.index(max(values))


if __name__ == "__main__":
    sys.exit(main())
