"""`python -m swarmnode.policy.describe --config FILE`: prints the model's entries of a manifest as
one line of JSON.

It is a separate process, so that `swarmnode init` does not load torch. The model is hashed. If it
fits into memory, it is also tried, so that no swarm is founded on a model that cannot be trained.
The founder's machine need not have the memory.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

from transformers import AutoConfig

from swarmnode.config import Config, PolicyConfig, TrainingConfig
from swarmnode.errors import DeviceError
from swarmnode.gguf import is_gguf
from swarmnode.policy.device import fit, probe
from swarmnode.policy.fingerprint import fingerprint, tokenizer_hash, weight_files
from swarmnode.policy.load import load_tokenizer, local_directory, offline
from swarmnode.policy.trial import try_policy
from swarmnode.process import die_with_parent, run_main


def describe(cfg: PolicyConfig, training: TrainingConfig | None = None) -> dict[str, str]:
    """Return name, revision, and the hashes of model and tokenizer in hex.

    Raises:
        Unavailable: The model does not exist, is incomplete, or cannot be trained.
    """
    with local_directory(cfg) as directory:
        weight_files(directory)
        tokenizer = load_tokenizer(cfg, directory)
        config = offline(
            cfg, lambda: AutoConfig.from_pretrained(directory, trust_remote_code=False)
        )
        hashes = {
            "fingerprint": fingerprint(directory).hex(),
            "tokenizer": tokenizer_hash(tokenizer).hex(),
        }
        with contextlib.suppress(DeviceError):  # the model may still fit on members' machines
            fit(cfg, config, probe(cfg))
            try_policy(cfg, training)
    path = Path(cfg.model)  # never in a manifest: its last part is a name for people
    name = path.name if is_gguf(cfg.model) or path.expanduser().is_dir() else cfg.model
    return {"name": name, "revision": cfg.revision or "", **hashes}


def main() -> int:
    die_with_parent()
    config = Config.model_validate_json(Path(sys.argv[sys.argv.index("--config") + 1]).read_bytes())
    print(json.dumps(describe(config.policy, config.training)))
    return 0


if __name__ == "__main__":
    sys.exit(run_main("swarmnode init", main))
