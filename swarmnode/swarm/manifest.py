"""What a swarm agrees on, and what that means for one node. Neither libp2p nor torch: the bytes are in `wire.manifest`.

    draft       a founder's configuration ─▶ manifest                       `swarmnode init`
    can_honour  manifest, configuration ─▶ everything that stands against it, in words
    agreed      manifest, configuration ─▶ the configuration to run with, and what was changed

A manifest comes from a stranger. Nothing in it is looked up as a path, run, or shown without having been bounded by `wire.bounds`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from pydantic import ValidationError

from swarmnode import __version__
from swarmnode.config import Config, TrainingConfig
from swarmnode.errors import ConfigError, Refused, Unavailable
from swarmnode.files import read_private
from swarmnode.p2p import addresses
from swarmnode.tasks import own
from swarmnode.tasks.registry import DATASET_NAME, REFUSED, TASKS, task_version
from swarmnode.wire import ids, limits
from swarmnode.wire.envelope import peer_id
from swarmnode.wire.manifest import Opened, keeps_rules
from swarmnode.wire.messages import Access, ModelRef, RolloutGroup, RolloutRules, Setting, SwarmManifest, TaskEntry

AGREED = (
    "stages.codec", "stages.gradient_codec", "stages.paper_mode", "training.advantage", "training.loss_type",
    "weights.codec", "weights.fragments", "weights.lora_a", "weights.rule", "weights.sync_every",
)  # fmt: skip
"""Configuration keys that travel under `settings`. A key that is not here makes a manifest one that this version cannot honour."""
SECRET_FILE = "swarm.secret"
_HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")


@dataclass(frozen=True)
class Change:
    """A configuration value that the manifest replaced."""

    key: str
    was: Any
    now: Any


# ---- founding -----------------------------------------------------------------------------------------------------------


def draft(
    config: Config,
    founder: bytes,
    models: Sequence[ModelRef],
    *,
    created_at: int,
    completions: tuple[int, int] | None = None,
    bootstrap: Sequence[str] = (),
    members: Sequence[str] = (),
    secret: bytes | None = None,
    predecessor: bytes = b"",
) -> SwarmManifest:
    """The manifest of a swarm that does what `config` does.

    founder: 32-byte public key; models: none means any; created_at: Unix milliseconds; completions: of a group, at least and at most,
    by default half and twice `training.num_generations`; secret: the pre-shared one, of which only the commitment is told.
    """
    training = config.training
    size = training.num_generations
    low, high = completions or (max(limits.MIN_COMPLETIONS, size // 2), min(limits.COMPLETIONS, 2 * size))
    if not low <= size <= high - (training.advantage == "mc_grpo"):
        raise ConfigError(f"training.num_generations is {size}, outside the swarm's {low} to {high} (mc_grpo samples one more)")
    return SwarmManifest(
        name=config.swarm.name,
        founder=founder,
        created_at=created_at,
        predecessor=predecessor,
        minimum_version=__version__,
        protocols=sorted(ids.PROTOCOLS),
        models=list(models),
        tasks=[TaskEntry(name, task_version(name), _settings_text(name)) for name in sorted(config.task.names)],
        rollouts=RolloutRules(
            min_completions=low, max_completions=high, max_tokens=training.max_completion_length,
            temperature=training.temperature, top_p=training.top_p, groups_per_second=config.sharing.groups_per_second,
        ),
        settings=[Setting(key, json.dumps(_get(config, key))) for key in sorted(AGREED)],
        bootstrap=list(bootstrap),
        access=Access(sorted(set(members)), commitment(secret) if secret is not None else b""),
    )  # fmt: skip


def commitment(secret: bytes) -> bytes:
    """What a manifest tells of a swarm's 32-byte secret: enough to know it again. It must be random, since guesses can be tried."""
    return hashlib.blake2b(ids.DOMAIN_SECRET + secret, digest_size=limits.SECRET_BYTES).digest()


def _settings_text(task: str) -> str:
    """For people, in a manifest: a task's settings, and where the rows of a dataset are from."""
    spec = TASKS[task]
    settings = dict(spec.settings)
    if spec.rows is not None:
        settings = {"source": spec.rows.origin, "rows": spec.rows.rows, "content": spec.rows.content, "extract": spec.extract, **settings}
    return json.dumps(settings, sort_keys=True)[: limits.SETTING_VALUE_BYTES]


# ---- joining ------------------------------------------------------------------------------------------------------------


def can_honour(manifest: SwarmManifest, config: Config, peer: str = "") -> list[str]:
    """Why this node cannot take part: one sentence each, empty when it can. `peer`: its peer id, "" if not known yet.

    Whether the model on disk is the manifest's shows when the trainer has hashed it.
    """
    return [
        *_version_problems(manifest.minimum_version),
        *[
            f"its members speak {name}, this version of swarmnode does not: upgrade"
            for name in manifest.protocols
            if name not in ids.SPOKEN
        ],
        *[problem for task in manifest.tasks for problem in _task_problems(task)],
        *_setting_problems(manifest, config),
        *_model_problems(manifest, config),
        *_access_problems(manifest, config, peer),
    ]


def agreed(config: Config, opened: Opened) -> tuple[Config, list[Change]]:
    """`config` with everything that the swarm agrees on in place of what was set. Call `can_honour` first.

    A node's own limits stay where the manifest leaves room: group size and length of completions within the swarm's bounds. Raises
    ConfigError when a setting of the manifest does not fit.
    """
    manifest = opened.manifest
    rules = manifest.rollouts
    own_length = config.training.max_completion_length
    unset = own_length == TrainingConfig.model_fields["max_completion_length"].default
    known = dict.fromkeys([*config.network.initial_peers, *bootstrap(manifest)])
    settings = {setting.key: json.loads(setting.value) for setting in manifest.settings}
    pivot = settings.get("training.advantage", config.training.advantage) == "mc_grpo"  # one completion more than is trained on
    most = max(limits.MIN_COMPLETIONS, rules.max_completions - pivot)
    wanted: dict[str, Any] = {
        "swarm.id": opened.swarm.hex(),
        "swarm.name": manifest.name,
        "network.initial_peers": list(known),
        "task.names": [task.id for task in manifest.tasks],
        "training.num_generations": min(max(config.training.num_generations, rules.min_completions), most),
        "training.max_completion_length": rules.max_tokens if unset else min(own_length, rules.max_tokens),
        "training.temperature": rules.temperature,
        "training.top_p": rules.top_p,
        "sharing.groups_per_second": rules.groups_per_second,
        **settings,
    }
    model = chosen_model(manifest, config)
    if model is not None and model.name != config.policy.model:
        wanted |= {"policy.model": model.name, "policy.revision": model.revision or None}
    return _with(config, wanted), [Change(key, was, now) for key, now in wanted.items() if (was := _get(config, key)) != now]


def chosen_model(manifest: SwarmManifest, config: Config) -> ModelRef | None:
    """The model to start from; None when the configured one stands: any is allowed, or it is a directory, whose content decides."""
    if not manifest.models or _is_directory(config.policy.model):
        return None
    return next((model for model in manifest.models if model.name == config.policy.model), manifest.models[0])


def check_model(manifest: SwarmManifest, fingerprint: bytes, tokenizer: bytes) -> None:
    """Raises Refused when a loaded policy (32-byte hashes) is none of the manifest's."""
    if not manifest.models or any((model.fingerprint, model.tokenizer) == (fingerprint, tokenizer) for model in manifest.models):
        return
    if any(model.fingerprint == fingerprint for model in manifest.models):
        raise Refused("the model is the swarm's, but its tokenizer is not: fetch the revision that the manifest names")
    names = " or ".join(f"{model.name} {model.fingerprint.hex()[:16]}…" for model in manifest.models)
    own = f"{fingerprint.hex()[:16]}…"
    raise Refused(f"the model loaded has fingerprint {own}; the swarm trains {names}: set policy.model and policy.revision")


def shown(manifest: SwarmManifest) -> dict[str, Any]:
    """As JSON has it, for people: bytes in hex."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: plain(item) for name, item in value.items()}
        if isinstance(value, list):
            return [plain(item) for item in value]
        return value.hex() if isinstance(value, bytes) else value

    return dict(plain(msgspec.to_builtins(manifest, builtin_types=(bytes,))))


def rules_of(manifest: SwarmManifest) -> Callable[[RolloutGroup], bool]:
    """The check that every member makes of every group."""
    models = frozenset((model.fingerprint, model.tokenizer) for model in manifest.models)
    return lambda group: keeps_rules(group, manifest.rollouts, models)


def members(manifest: SwarmManifest) -> frozenset[str] | None:
    """Peer ids that may connect; None when everybody may."""
    if not manifest.access.members:
        return None
    bootstraps = {peer for text in bootstrap(manifest) if (peer := addresses.parse(text)[1])}
    return frozenset({*manifest.access.members, peer_id(manifest.founder), *bootstraps})


def bootstrap(manifest: SwarmManifest) -> list[str]:
    """Its bootstrap addresses, those that this version can dial."""
    found = []
    for text in manifest.bootstrap:
        try:
            _, peer = addresses.parse(text)
        except ValueError:
            continue
        if peer is not None:
            found.append(text)
    return found


def swarm_secret(config: Config) -> bytes | None:
    """The pre-shared secret, 32 bytes; None if this node has none.

    Raises Refused if others can read the file, ConfigError if it is not one or not there although it was named.
    """
    path = config.swarm.secret_file or config.node.data_dir / SECRET_FILE
    data = read_private(path, "swarm secret", 4096)
    if data is None:
        if config.swarm.secret_file is not None:
            raise ConfigError(f"swarm.secret_file: {path}: no such file")
        return None
    return parse_secret(data, path)


def parse_secret(data: bytes, path: Path) -> bytes:
    """The secret in a file of 64 hex digits. Raises ConfigError."""
    text = data.strip().lower()
    if not re.fullmatch(rb"[0-9a-f]{64}", text):
        raise ConfigError(f"{path}: a swarm's secret is 64 hex digits")
    return bytes.fromhex(text.decode())


# ---- what stands against it ---------------------------------------------------------------------------------------------


def _version_problems(minimum: str) -> list[str]:
    try:
        if version_numbers(__version__) >= version_numbers(minimum):
            return []
    except ValueError:
        return [f"its minimum version {minimum!r} is not one that this version understands: upgrade"]
    return [f"it needs swarmnode {minimum} or later, this is {__version__}: upgrade"]


def version_numbers(version: str) -> tuple[int, ...]:
    """`0.10.2` → (0, 10, 2). Raises ValueError for anything but numbers with dots."""
    if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9}){0,3}", version):
        raise ValueError(version)
    numbers = [int(part) for part in version.split(".")]
    return tuple(numbers + [0] * (4 - len(numbers)))


def _task_problems(task: TaskEntry) -> list[str]:
    if task.id in REFUSED:
        return [f"its task {task.id} is refused because {REFUSED[task.id]}: a peer could run code on this machine"]
    if task.id not in TASKS and DATASET_NAME.fullmatch(task.id):
        return [f"its task {task.id} is a dataset, which this node lacks: get it and name it in task.datasets ({task.settings})"]
    if task.id not in TASKS and own.NAME.fullmatch(task.id):
        return [f"its task {task.id} is its founder's own: get that module, read it, install it, and name it in task.modules"]
    if task.id not in TASKS:
        return [f"its task {task.id} is not one of this version's: upgrade, or install what provides it"]
    try:
        version = task_version(task.id)
    except Unavailable as error:
        return [str(error)]
    if version == task.version:
        return []
    if TASKS[task.id].rows is not None:
        here = _settings_text(task.id)
        return [f"its task {task.id} is a dataset with other rows or settings: the swarm's is {task.settings}, here it is {here}"]
    if TASKS[task.id].source is not None:
        wanted = f"the swarm's has the settings {task.settings}, here they are {_settings_text(task.id)}"
        return [f"its task {task.id} has version {task.version}, here {version}: get the founder's files, to the byte ({wanted})"]
    return [f"its task {task.id} has version {task.version}, here it has {version}: install the swarm's version"]


def _setting_problems(manifest: SwarmManifest, config: Config) -> list[str]:
    problems = []
    for setting in manifest.settings:
        if setting.key not in AGREED:
            problems.append(f"it sets {setting.key}, which this version does not know: upgrade")
            continue
        try:
            _with(config, {setting.key: json.loads(setting.value)})
        except (ValueError, RecursionError):
            problems.append(f"it sets {setting.key} to {setting.value[:40]}, which this version does not know: upgrade")
        except ConfigError as error:
            problems.append(str(error))
    return problems


def _model_problems(manifest: SwarmManifest, config: Config) -> list[str]:
    model = chosen_model(manifest, config)
    if model is None or model.name == "embedded" or _HUB_NAME.fullmatch(model.name):
        return []
    return [f"its model {model.name!r} is neither embedded nor on the Hub: set policy.model to a directory that holds it"]


def _access_problems(manifest: SwarmManifest, config: Config, peer: str) -> list[str]:
    problems = []
    allowed = members(manifest)
    if allowed is not None and peer and peer not in allowed:
        problems.append(f"it is private and {peer} is not on its list of members: send the founder this peer id")
    if manifest.access.secret:
        secret = swarm_secret(config)
        if secret is None:
            problems.append("it is private: put its secret into a file and name it with --secret-file")
        elif commitment(secret) != manifest.access.secret:
            problems.append("the swarm secret here is another swarm's")
    return problems


# ---- configuration by dotted key ----------------------------------------------------------------------------------------


def _is_directory(model: str) -> bool:
    return "/" in model and Path(model).expanduser().is_dir()


def _get(config: Config, key: str) -> Any:
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def _with(config: Config, values: dict[str, Any]) -> Config:
    tree = config.model_dump()
    for key, value in values.items():
        *path, leaf = key.split(".")
        section = tree
        for name in path:
            section = section[name]
        section[leaf] = value
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"manifest: {'.'.join(str(part) for part in first['loc'])}: {first['msg']}") from None
