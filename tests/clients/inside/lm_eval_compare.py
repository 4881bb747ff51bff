"""Run two small tasks with lm_eval: through a server, and with its own `hf` backend.

    python tests/clients/inside/lm_eval_compare.py FOLDER URL

FOLDER holds the model for transformers, URL is that of a server with the same weights in fp32. Prints one JSON object:
how far the log-likelihoods are apart, how many picks and generated texts are the same, and whether the tokenizer behind
the server's own routes gives the same as the folder's.
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
COMMON = """\
dataset_path: json
dataset_kwargs:
  data_files: {test: "FILE"}
test_split: test
doc_to_text: "{{question}}"
"""
SCORING = (
    COMMON
    + """\
task: scoring
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: label
target_delimiter: " "
metric_list:
  - metric: acc
"""
)
GENERATION = (
    COMMON
    + """\
task: generation
output_type: generate_until
doc_to_target: "{{choices[label]}}"
generation_kwargs:
  until: [".", ",", "\\n\\n"]
  max_gen_toks: 12
  do_sample: false
metric_list:
  - metric: exact_match
"""
)


def write_tasks(folder: Path) -> None:
    """Two YAML tasks over one JSON Lines file, all local."""
    lines = [json.dumps({"question": q, "choices": choices, "label": label}) for q, choices, label in ITEMS]
    (folder / "items.jsonl").write_text("\n".join(lines) + "\n")
    for name, task in (("scoring", SCORING), ("generation", GENERATION)):
        (folder / f"{name}.yaml").write_text(task.replace("FILE", str(folder / "items.jsonl")))


def answers(model: str, arguments: str, tasks: Path) -> tuple[list[list[float]], list[str]]:
    """The log-likelihood of every choice of every item, and the text that goes on from every question."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    results: dict[str, Any] = lm_eval.simple_evaluate(
        model=model,
        model_args=arguments,
        tasks=["scoring", "generation"],
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        batch_size=1,
        device="cpu",
        log_samples=True,
        bootstrap_iters=0,
    )

    def samples(task: str) -> list[dict[str, Any]]:
        return sorted(results["samples"][task], key=lambda sample: sample["doc_id"])

    # One entry per choice: (log-likelihood, whether it is the greedy continuation).
    scores = [[float(answer[0][0]) for answer in sample["resps"]] for sample in samples("scoring")]
    return scores, [sample["resps"][0][0] for sample in samples("generation")]


def main() -> None:
    """Compare and report."""
    folder, url = sys.argv[1:]
    os.environ["HF_DATASETS_OFFLINE"] = os.environ["HF_HUB_OFFLINE"] = "1"
    served = f"model=SmolLM2-135M-Instruct,base_url={url}/v1/completions,num_concurrent=8,max_retries=1"
    with tempfile.TemporaryDirectory() as tasks:
        write_tasks(Path(tasks))
        ours, our_texts = answers(
            "local-completions", f"{served},tokenizer={folder},tokenizer_backend=huggingface", Path(tasks)
        )
        # "auto" takes the server's own /tokenizer_info, /tokenize and /detokenize.
        remote, remote_texts = answers("local-completions", f"{served},tokenizer_backend=auto", Path(tasks))
        theirs, their_texts = answers("hf", f"pretrained={folder},dtype=float32", Path(tasks))
    report = {
        "items": len(ours),
        "choices": sum(map(len, ours)),
        "largest difference": largest_difference(ours, theirs),
        "largest difference with the server's tokenizer": largest_difference(remote, theirs),
        "same picks": [max(own) == own[pick(other)] for own, other in zip(ours, theirs, strict=True)].count(True),
        "right": sum(pick(own) == label for own, (_, _, label) in zip(ours, ITEMS, strict=True)),
        "texts": [our_texts, remote_texts, their_texts],
    }
    sys.stdout.write(json.dumps(report) + "\n")


def largest_difference(one: list[list[float]], other: list[list[float]]) -> float:
    """Between the log-likelihoods of the same choice."""
    rows = zip(one, other, strict=True)
    return max(abs(a - b) for row, other_row in rows for a, b in zip(row, other_row, strict=True))


def pick(values: list[float]) -> int:
    """Index of the most likely choice."""
    return values.index(max(values))


if __name__ == "__main__":
    main()
