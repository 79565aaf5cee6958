"""`python -m swarmnode.policy.describe --config FILE`: what a manifest says of a model, as one line of JSON.

A process of its own, so that `swarmnode init` does not load torch. The model is hashed, not run: no device and no memory for it needed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from transformers import AutoTokenizer

from swarmnode.config import Config, PolicyConfig
from swarmnode.policy.fingerprint import fingerprint, tokenizer_hash, weight_files
from swarmnode.policy.load import local_directory, offline
from swarmnode.process import die_with_parent, run_main


def describe(cfg: PolicyConfig) -> dict[str, str]:
    """name, revision, and the two hashes in hex. Raises Unavailable when the model is not there or not whole."""
    with local_directory(cfg) as directory:
        weight_files(directory)
        tokenizer = offline(cfg, lambda: AutoTokenizer.from_pretrained(directory, trust_remote_code=False))
        hashes = {"fingerprint": fingerprint(directory).hex(), "tokenizer": tokenizer_hash(tokenizer).hex()}
    name = Path(cfg.model).name if Path(cfg.model).expanduser().is_dir() else cfg.model
    return {"name": name, "revision": cfg.revision or "", **hashes}


def main() -> int:
    die_with_parent()
    config = Config.model_validate_json(Path(sys.argv[sys.argv.index("--config") + 1]).read_bytes())
    print(json.dumps(describe(config.policy)))
    return 0


if __name__ == "__main__":
    sys.exit(run_main("swarmnode init", main))
