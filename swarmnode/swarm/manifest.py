"""The manifest of a swarm and its effect on a node's configuration. Loads neither libp2p nor torch.
`wire.manifest` handles the bytes, `requirements` checks whether a node can take part.

    draft    a founder's configuration ─▶ manifest                              `swarmnode init`
    agreed   manifest, configuration ─▶ effective configuration and its changes

A manifest comes from a stranger. Its values are bounded by `wire.bounds` before they are displayed,
and never used as a path or executed.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from swarmnode import __version__, settings
from swarmnode.config import Config, PolicyConfig
from swarmnode.errors import ConfigError, Refused
from swarmnode.files import read_private
from swarmnode.gguf import is_gguf
from swarmnode.p2p import addresses
from swarmnode.tasks.registry import ENVIRONMENT_NAME, PROVIDED_KINDS, TASKS, task_version
from swarmnode.wire import ids, limits
from swarmnode.wire.envelope import peer_id
from swarmnode.wire.manifest import VerifiedManifest, meets_rules
from swarmnode.wire.messages import (
    Access,
    ModelRef,
    RolloutGroup,
    RolloutRules,
    Setting,
    SwarmManifest,
    TaskEntry,
)

AGREED_KEYS = (
    "policy.chat",
    "stages.codec",
    "stages.recovery",
    "training.advantage",
    "training.loss_type",
    "weights.fragments",
    "weights.rule",
    "weights.sync_every",
)
"""Configuration keys in the manifest's `settings`. A node cannot honour a manifest with an unknown
key."""
SECRET_FILE = "swarm.secret"


@dataclass(frozen=True)
class Change:
    """A configuration value that the manifest replaced."""

    key: str
    was: object
    now: object
    was_set: bool
    """True if the operator had set the value, False if it was the default."""

    @property
    def reorders(self) -> bool:
        """Return True if only the order differs, which neither tasks nor peers have."""
        return (
            isinstance(self.was, list)
            and isinstance(self.now, list)
            and sorted(self.was) == sorted(self.now)
        )

    @property
    def overrules(self) -> bool:
        """Return True if it replaces a value that the operator has set. Bootstrap peers are only
        added."""
        return self.was_set and self.key != "network.initial_peers" and not self.reorders


# ---- founding ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Terms:
    """The founder's terms beside the configuration."""

    created_at: int
    """Unix time in milliseconds."""
    completions: tuple[int, int] | None = None
    """Bounds of the group size; by default half and twice `training.num_generations`."""
    bootstrap: Sequence[str] = ()
    members: Sequence[str] = ()
    secret: bytes | None = None
    """The pre-shared secret; the manifest contains only its commitment."""
    predecessor: bytes = b""


def draft(
    config: Config, founder: bytes, models: Sequence[ModelRef], terms: Terms
) -> SwarmManifest:
    """Return the manifest of a swarm with this configuration.

    Args:
        config: the founder's configuration.
        founder: public key of the founder, 32 bytes.
        models: allowed models; empty allows any.
        terms: the other terms.

    Raises:
        ConfigError: a setting does not fit into a manifest.
    """
    training = config.training
    size = training.num_generations
    low, high = terms.completions or (
        max(limits.MIN_COMPLETIONS, size // 2),
        min(limits.COMPLETIONS, 2 * size),
    )
    if not low <= size <= high:
        raise ConfigError(
            f"training.num_generations is {size}, outside the swarm's {low} to {high}"
        )
    if not terms.members and terms.secret is None:
        refuse_environments(config.task.names, "the swarm is founded with --private or --member")
    return SwarmManifest(
        name=config.swarm.name,
        founder=founder,
        created_at=terms.created_at,
        predecessor=terms.predecessor,
        minimum_version=__version__,
        protocols=sorted(ids.PROTOCOLS),
        models=list(models),
        tasks=[
            TaskEntry(name, task_version(name), settings_text(name))
            for name in sorted(config.task.names)
        ],
        rollouts=RolloutRules(
            min_completions=low,
            max_completions=high,
            max_tokens=training.max_completion_length,
            temperature=training.temperature,
            top_p=training.top_p,
            groups_per_second=config.sharing.groups_per_second,
        ),
        settings=[
            Setting(key, _setting_json(settings.value(config, key), key)) for key in AGREED_KEYS
        ],
        bootstrap=list(terms.bootstrap),
        access=Access(
            sorted(set(terms.members)),
            commitment(terms.secret) if terms.secret is not None else b"",
        ),
    )


def _setting_json(value: object, key: str) -> str:
    """Return a setting as JSON. Raises ConfigError if it is too long for a manifest."""
    text = json.dumps(value, sort_keys=True)
    if len(text.encode()) > limits.SETTING_VALUE_BYTES:
        raise ConfigError(
            f"{key} takes {len(text.encode())} bytes in the manifest, of"
            f" {limits.SETTING_VALUE_BYTES}: make it shorter"
        )
    return text


def refuse_environments(tasks: Collection[str], unless: str) -> None:
    """Raise ConfigError for the first task that is an environment by URL, because groups of
    strangers would cause requests to that URL."""
    for task in tasks:
        if ENVIRONMENT_NAME.fullmatch(task):
            raise ConfigError(
                f"task.names: {task!r} is an environment by URL, which no swarm may have unless"
                f" {unless}"
            )


def commitment(secret: bytes) -> bytes:
    """Return the commitment to a swarm's 32-byte secret, which allows verifying it. The secret must
    be random, because the commitment allows testing guesses."""
    return hashlib.blake2b(ids.DOMAIN_SECRET + secret, digest_size=limits.SECRET_BYTES).digest()


def settings_text(task: str) -> str:
    """Return the settings of a task for display in a manifest, with the origin of a dataset's
    rows."""
    spec = TASKS[task]
    settings = dict(spec.settings)
    if spec.kind in PROVIDED_KINDS and spec.extract != "tag":
        settings["extract"] = spec.extract
    if spec.environment is not None:
        settings = {"content": spec.environment.content, "extract": spec.extract, **settings}
    if spec.rows is not None:
        settings = {
            "source": spec.rows.origin,
            "rows": spec.rows.rows,
            "content": spec.rows.content,
            "extract": spec.extract,
            **settings,
        }
    return json.dumps(settings, sort_keys=True)[: limits.SETTING_VALUE_BYTES]


# ---- joining -------------------------------------------------------------------------------------


def apply_terms(
    config: Config, opened: VerifiedManifest, *, trains: bool = True
) -> tuple[Config, list[Change]]:
    """Return `config` with the swarm's terms in place of its own, and the changes. Call
    `requirements.can_honour` first.

    Own values stay where the manifest leaves room: group size and completion length within the
    swarm's bounds. A node that does not train adopts only the identity of the swarm. Raises
    ConfigError if a setting of the manifest is invalid.
    """
    manifest = opened.manifest
    known = dict.fromkeys([*config.network.initial_peers, *bootstrap(manifest)])
    wanted: dict[str, object] = {
        "swarm.id": opened.swarm.hex(),
        "swarm.name": manifest.name,
        "network.initial_peers": list(known),
    }
    if trains:
        wanted |= _training_terms(manifest, config) | _model_terms(manifest, config.policy)
    changed = settings.replaced(config, wanted, "manifest")
    before = {key: settings.value(config, key) for key in wanted}
    return changed, [
        Change(key, before[key], now, settings.is_set(config, key))
        for key, now in wanted.items()
        if before[key] != now
    ]


def _training_terms(manifest: SwarmManifest, config: Config) -> dict[str, object]:
    rules, training = manifest.rollouts, config.training
    own_length = (
        training.max_completion_length
        if settings.is_set(config, "training.max_completion_length")
        else rules.max_tokens
    )
    # a key that the manifest lacks has its default (protocol/01-identity-and-join.md, section 6)
    defaults = {key: settings.value(Config(), key) for key in AGREED_KEYS}
    agreed = defaults | {setting.key: json.loads(setting.value) for setting in manifest.settings}
    size = min(max(training.num_generations, rules.min_completions), rules.max_completions)
    return {
        "task.names": [task.id for task in manifest.tasks],
        "training.num_generations": size,
        "training.max_completion_length": min(own_length, rules.max_tokens),
        "training.temperature": rules.temperature,
        "training.top_p": rules.top_p,
        "sharing.groups_per_second": rules.groups_per_second,
        **agreed,
    }


def _model_terms(manifest: SwarmManifest, policy: PolicyConfig) -> dict[str, object]:
    model = chosen_model(manifest, policy.model)
    if model is None or model.name == policy.model:
        return {}
    return {"policy.model": model.name, "policy.revision": model.revision or None}


def chosen_model(manifest: SwarmManifest, own: str) -> ModelRef | None:
    """Return the model to start from; None if `own` is kept, because any model is allowed or `own`
    is a directory or file, whose content is checked after loading."""
    if not manifest.models or _is_local(own):
        return None
    return next((model for model in manifest.models if model.name == own), manifest.models[0])


def check_model(manifest: SwarmManifest, fingerprint: bytes, tokenizer: bytes) -> None:
    """Raise Refused unless the manifest allows a loaded policy with these 32-byte hashes."""
    if not manifest.models or any(
        (model.fingerprint, model.tokenizer) == (fingerprint, tokenizer)
        for model in manifest.models
    ):
        return
    if any(model.fingerprint == fingerprint for model in manifest.models):
        raise Refused(
            "the model is the swarm's, but its tokenizer is not: fetch the revision that the"
            " manifest names"
        )
    names = " or ".join(
        f"{model.name} {model.fingerprint.hex()[:16]}…" for model in manifest.models
    )
    own = f"{fingerprint.hex()[:16]}…"
    raise Refused(
        f"the model loaded has fingerprint {own}; the swarm trains {names}: set policy.model and"
        " policy.revision"
    )


def displayable(manifest: SwarmManifest) -> dict[str, object]:
    """Return the manifest as JSON values for display, with bytes in hex."""

    def plain(value: object) -> object:
        if isinstance(value, dict):
            return {name: plain(item) for name, item in value.items()}
        if isinstance(value, list):
            return [plain(item) for item in value]
        return value.hex() if isinstance(value, bytes) else value

    fields: dict[str, object] = msgspec.to_builtins(manifest, builtin_types=(bytes,))
    return {name: plain(item) for name, item in fields.items()}


def group_check(manifest: SwarmManifest) -> Callable[[RolloutGroup], bool]:
    """Return the check that every member applies to every group."""
    models = frozenset((model.fingerprint, model.tokenizer) for model in manifest.models)
    return lambda group: meets_rules(group, manifest.rollouts, models)


def members(manifest: SwarmManifest) -> frozenset[str] | None:
    """Return the peer ids that may connect; None for all."""
    if not manifest.access.members:
        return None
    bootstraps = {peer for text in bootstrap(manifest) if (peer := addresses.parse(text)[1])}
    return frozenset({*manifest.access.members, peer_id(manifest.founder), *bootstraps})


def bootstrap(manifest: SwarmManifest) -> list[str]:
    """Return the bootstrap addresses that this version can dial."""
    found = []
    for text in manifest.bootstrap:
        try:
            _, peer = addresses.parse(text)
        except ValueError:
            continue
        if peer is not None:
            found.append(text)
    return found


def swarm_secret(data_dir: Path) -> bytes | None:
    """Return the pre-shared secret (32 bytes) in the data directory; None without one.

    Raises:
        Refused: others can read the file.
        ConfigError: the file does not hold a secret.
    """
    path = data_dir / SECRET_FILE
    data = read_private(path, "swarm secret", 4096)
    return parse_secret(data, path) if data is not None else None


def parse_secret(data: bytes, path: Path) -> bytes:
    """Return the secret in a file of 64 hex digits. Raises ConfigError."""
    text = data.strip().lower()
    if not re.fullmatch(rb"[0-9a-f]{64}", text):
        raise ConfigError(f"{path}: a swarm's secret is 64 hex digits")
    return bytes.fromhex(text.decode())


def _is_local(model: str) -> bool:
    path = Path(model).expanduser()
    return "/" in model and (path.is_dir() or (is_gguf(model) and path.is_file()))
