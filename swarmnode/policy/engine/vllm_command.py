"""Command line that starts a matching vLLM server: `swarmnode vllm-command`."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from urllib.parse import urlsplit

from swarmnode.config import Config
from swarmnode.errors import ConfigError
from swarmnode.gguf import is_gguf
from swarmnode.model_defaults import EMBEDDED
from swarmnode.policy.convert import local_copy

DEFAULT_URL = "http://127.0.0.1:8000"
QUESTION_TOKENS = 2048
"""Tokens of the server's context that are reserved for the question."""
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts for --max-lora-rank."""
SHARED_CARD = 0.4
"""Share of a GPU's memory that the server gets if the trainer uses the same GPU."""
CPU_CACHE_GIB = 4
NVIDIA_CARDS = Path("/proc/driver/nvidia/gpus")


@dataclass
class VllmCommand:
    """The command to start a server, with notes for the operator."""

    environment: dict[str, str] = field(default_factory=dict)
    arguments: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def line(self) -> str:
        words = [f"{key}={shlex.quote(value)}" for key, value in self.environment.items()]
        return " ".join([*words, *map(shlex.quote, self.arguments)])


def vllm_command(config: Config, cards: Path = NVIDIA_CARDS) -> VllmCommand:
    """Return the command that starts the server for `config`.

    Args:
        cards: Directory with one entry for each NVIDIA GPU of this machine.

    Raises:
        ConfigError: vLLM cannot serve this policy.
    """
    policy, made = config.policy, VllmCommand()
    url = urlsplit(policy.server.url or DEFAULT_URL)
    host, port = url.hostname or "", url.port or (443 if url.scheme == "https" else 80)
    here = len(list(cards.iterdir())) if cards.is_dir() and policy.device != "cpu" else 0
    dtype = policy.dtype if policy.dtype != "auto" else "bfloat16" if here else "float32"
    made.environment["VLLM_SERVER_DEV_MODE"] = "1"
    made.arguments += ["python", "-m", "vllm.entrypoints.openai.api_server", "--model"]
    made.arguments += [_model(config), *_revision(config), "--dtype", dtype]
    made.arguments += ["--enable-scale-out", "--logprobs-mode", "processed_logprobs"]
    made.arguments += ["--max-logprobs", "-1", "--max-model-len", str(_context(config))]
    if policy.lora.r:
        rank = next((each for each in VLLM_RANKS if each >= policy.lora.r), None)
        if rank is None:
            raise ConfigError(
                f"policy.lora.r: vLLM serves adapters of rank {VLLM_RANKS[-1]} or less"
            )
        made.environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
        made.arguments += ["--enable-lora", "--max-lora-rank", str(rank)]
    made.arguments += ["--host", host, "--port", str(port)]
    on_this_machine = host in ("localhost", "::1") or host.startswith("127.")
    if on_this_machine and here == 1:
        made.arguments += ["--gpu-memory-utilization", str(SHARED_CARD)]
        made.notes.append("the server and the trainer share this machine's one card")
    elif on_this_machine and here > 1:
        made.environment["CUDA_VISIBLE_DEVICES"] = str(here - 1)
        others = ",".join(f"cuda:{card}" for card in range(here - 1))
        made.notes.append(
            f"the server uses card {here - 1}: start the node with --set policy.devices={others}"
        )
    elif on_this_machine:
        made.environment["VLLM_CPU_KVCACHE_SPACE"] = str(CPU_CACHE_GIB)
    if policy.model == EMBEDDED:
        made.notes.append("vLLM on a CPU has no kernel for the heads of the embedded policy")
    if policy.quantization != "none":
        made.notes.append(
            "the server computes with the whole base, the trainer with a quantised one: the check"
            " may find them too far apart"
        )
    if not policy.server.url:
        made.notes.append(f"the node uses it with policy.server.url = {DEFAULT_URL}")
    return made


def _model(config: Config) -> str:
    model = config.policy.model
    if model == EMBEDDED:
        return str(resources.files("swarmnode.policy") / "embedded")
    directory = local_copy(model) if is_gguf(model) else Path(model).expanduser()
    return str(directory.absolute()) if directory.is_dir() else model


def _revision(config: Config) -> list[str]:
    return ["--revision", config.policy.revision] if config.policy.revision else []


def _context(config: Config) -> int:
    """Return the context length in tokens: question plus longest answer, or the model's limit if
    that is smaller."""
    wanted = QUESTION_TOKENS + config.training.max_completion_length
    path = Path(_model(config)) / "config.json"
    if not path.is_file():
        return wanted
    try:
        config_json = json.loads(path.read_bytes())
        found = config_json.get("text_config", config_json).get("max_position_embeddings")
    except (OSError, ValueError, AttributeError):
        return wanted
    return min(wanted, found) if isinstance(found, int) and found > 0 else wanted
