"""An engine program without a model: speaks the protocol, and misbehaves as it is told."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from server.config import Settings
from server.engine.link import EngineLink
from server.engine.process import die_with_parent, leave_signals_to_parent
from server.messages import (
    Abort,
    EngineFailed,
    EngineOutputs,
    EngineReady,
    EngineRequest,
    EngineStats,
    KVGroup,
    LoadedModel,
    Progress,
    RequestOutput,
    ResolvedRow,
    Shutdown,
)


def ready(settings: Settings) -> EngineReady:
    return EngineReady(
        rows=[ResolvedRow("target", "attention", settings.attention_backend or "unset", "torch", "auto")],
        kv_groups=[KVGroup(0, settings.block_size or 16, settings.block_size or 16, 1000, 2)],
        models=[LoadedModel("target", "ScriptedForCausalLM", 1, "0" * 12)],
        max_model_len=1_000_000,
        kv_bytes=2**20,
        device="cpu",
        load_seconds=0.1,
        vocab_size=256,
    )


def serve(link: EngineLink, step_seconds: float, deaf: bool) -> None:
    """One token of every open request each step."""
    left: dict[int, int] = {}
    while True:
        for message in link.receive(step_seconds):
            if isinstance(message, EngineRequest):
                left[message.request_id] = message.params.max_tokens
            elif isinstance(message, Abort):
                for request_id in message.request_ids:
                    left.pop(request_id, None)
            elif isinstance(message, Shutdown) and not deaf:
                return
        outputs = []
        for request_id in list(left):
            left[request_id] -= 1
            over = left[request_id] <= 0
            outputs.append(RequestOutput(request_id, [40], finish_reason="length" if over else None))
            if over:
                del left[request_id]
        link.send(EngineOutputs(outputs, EngineStats(len(left), 0, 0.0, 0, 0, 0, 0, {})))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config-file", type=Path)
    parser.add_argument("--link", type=Path)
    parser.add_argument("--parent", type=int)
    parser.add_argument("--load-seconds", type=float, default=0.0)
    parser.add_argument("--step-seconds", type=float, default=0.02)
    parser.add_argument("--fail", action="store_true")
    parser.add_argument("--crash", action="store_true")
    parser.add_argument("--deaf", action="store_true")
    parser.add_argument("--pids", type=Path, required=True)
    args = parser.parse_args()
    die_with_parent(args.parent)
    leave_signals_to_parent()
    child = subprocess.Popen(["sleep", "1000"])
    args.pids.write_text(f"{os.getpid()} {child.pid} {args.link}")
    settings = Settings.model_validate_json(args.config_file.read_text())
    link = EngineLink(args.link)
    link.send(Progress("loading weights", 1, 2))
    time.sleep(args.load_seconds)
    if args.crash:
        os._exit(3)
    if args.fail:
        link.send(EngineFailed("the weights are not there: give others"))
        link.close()
        return 1
    link.send(ready(settings))
    serve(link, args.step_seconds, args.deaf)
    child.kill()
    link.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
