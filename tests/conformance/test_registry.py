"""protocol/registry.toml and protocol/schema agree with swarmnode/wire."""

import re
import tomllib
from pathlib import Path

import libp2p.security.noise.transport as noise_transport
import pytest

from protocol.generate.schema import schemas
from protocol.generate.schema_stages import schemas as stages_schemas
from protocol.generate.schema_weights import schemas as weights_schemas
from swarmnode.p2p import exchange, manifests, sessions, summaries
from swarmnode.p2p.bulk.service import MANIFEST_TIMEOUT_SECONDS
from swarmnode.rollouts import admission
from swarmnode.rollouts.exchange import ANSWER_SECONDS, fetch_deadline
from swarmnode.rollouts.reasons import REASONS, Verdict
from swarmnode.stages import service, wire
from swarmnode.stages.wire import FENCE_REASONS, MAX_MEMBERS, STATE_REASONS
from swarmnode.tasks import seeds
from swarmnode.weights import discovery as weights_discovery
from swarmnode.weights import messages as weights_messages
from swarmnode.weights import state
from swarmnode.wire import envelope, ids, limits
from swarmnode.wire.codec import DECODE_REASONS

PROTOCOL = Path(__file__).parents[2] / "protocol"
REGISTRY = tomllib.loads((PROTOCOL / "registry.toml").read_text())


def test_names_match_the_registry():
    assert REGISTRY["protocols"] == {
        "listing": ids.LISTING_PROTOCOL,
        "groups": ids.GROUPS_PROTOCOL,
        "peers": ids.PEERS_PROTOCOL,
        "manifest": ids.MANIFEST_PROTOCOL,
        "session": ids.SESSION_PROTOCOL,
        "summary": ids.SUMMARY_PROTOCOL,
        "weights": ids.WEIGHTS_PROTOCOL,
        "weights_state": ids.WEIGHTS_STATE_PROTOCOL,
        "crews": ids.CREWS_PROTOCOL,
        "stage_stream": ids.STAGE_STREAM_PROTOCOL,
        "bulk": ids.BULK_PROTOCOL,
        "bulk_manifest": ids.BULK_MANIFEST_PROTOCOL,
    }
    assert REGISTRY["rules"] == {"choice": ids.CHOICE_RULE}


def test_swarm_id_covers_all_required_protocols():
    spoken = sorted(REGISTRY["protocols"][name] for name in REGISTRY["swarm"]["protocols"])
    assert tuple(spoken) == ids.PROTOCOLS
    assert tuple(sorted([*spoken, ids.CHOICE_RULE])) == ids.CHOICE_PROTOCOLS


def test_domain_strings_match_the_registry():
    ours = {
        "rollout": ids.DOMAIN_ROLLOUT,
        "swarm": ids.DOMAIN_SWARM,
        "swarm_manifest": ids.DOMAIN_SWARM_MANIFEST,
        "manifest": ids.DOMAIN_MANIFEST,
        "secret": ids.DOMAIN_SECRET,
        "session": ids.DOMAIN_SESSION,
        "summary": ids.DOMAIN_SUMMARY,
        "bulk": ids.DOMAIN_BULK,
        "state": ids.DOMAIN_STATE,
        "seed": ids.DOMAIN_SEED,
        "evaluation": ids.DOMAIN_EVALUATION,
        "task": ids.DOMAIN_TASK,
        "crew_record": wire.RECORD_DOMAIN,
    }
    assert {name: value.decode() for name, value in ours.items()} == REGISTRY["domains"]


def test_small_order_keys_match_the_registry():
    assert {key.hex() for key in envelope.SMALL_ORDER_KEYS} == set(REGISTRY["small_order_keys"])


def test_no_domain_string_is_a_prefix_of_another():
    domains = list(REGISTRY["domains"].values())
    assert not [(a, b) for a in domains for b in domains if a != b and b.startswith(a)]


def test_caps_match_the_registry():
    assert REGISTRY["bytes"] == {
        "group": limits.GROUP_BYTES,
        "listing_request": limits.LISTING_REQUEST_BYTES,
        "listing_response": limits.LISTING_RESPONSE_BYTES,
        "groups_request": limits.GROUPS_REQUEST_BYTES,
        "groups_response": limits.GROUPS_RESPONSE_BYTES,
        "peers_request": limits.PEERS_REQUEST_BYTES,
        "peers_response": limits.PEERS_RESPONSE_BYTES,
        "manifest": limits.MANIFEST_BYTES,
        "manifest_request": limits.MANIFEST_REQUEST_BYTES,
        "manifest_response": limits.MANIFEST_RESPONSE_BYTES,
        "session_request": limits.SESSION_REQUEST_BYTES,
        "session_response": limits.SESSION_RESPONSE_BYTES,
        "summary": limits.SUMMARY_BYTES,
        "summary_request": limits.SUMMARY_REQUEST_BYTES,
        "summary_response": limits.SUMMARY_RESPONSE_BYTES,
        "summary_name": limits.SUMMARY_NAME_BYTES,
        "bulk_chunk": limits.BULK_CHUNK_BYTES,
        "bulk_min_chunk": limits.BULK_MIN_CHUNK_BYTES,
        "bulk_manifest": limits.BULK_MANIFEST_BYTES,
        "bulk_manifest_request": limits.BULK_MANIFEST_REQUEST_BYTES,
        "bulk_manifest_response": limits.BULK_MANIFEST_RESPONSE_BYTES,
        "bulk_request": limits.BULK_REQUEST_BYTES,
        "bulk_response": limits.BULK_RESPONSE_BYTES,
        "weights_message": weights_messages.MESSAGE_BYTES,
        "weights_state_request": weights_messages.STATE_REQUEST_BYTES,
        "weights_state_response": weights_messages.STATE_BYTES,
        "crews_message": wire.MESSAGE_BYTES,
        "crew_reason": wire.REASON_BYTES,
        "stage_open": wire.OPEN_BYTES,
        "stage_chunk": wire.CHUNK_BYTES,
        "stage_header": limits.STAGE_HEADER_BYTES,
        "stage_about_item": limits.STAGE_ABOUT_ITEM_BYTES,
        "peer_id": limits.PEER_ID_BYTES,
        "address": limits.ADDRESS_BYTES,
        "zstd_window": limits.ZSTD_WINDOW_BYTES,
        "text": limits.TEXT_BYTES,
        "task_id": limits.TASK_ID_BYTES,
        "task_version": limits.VERSION_BYTES,
        "swarm_name": limits.SWARM_NAME_BYTES,
        "manifest_name": limits.MANIFEST_NAME_BYTES,
        "model_name": limits.MODEL_NAME_BYTES,
        "revision": limits.REVISION_BYTES,
        "protocol": limits.PROTOCOL_BYTES,
        "setting_key": limits.SETTING_KEY_BYTES,
        "setting_value": limits.SETTING_VALUE_BYTES,
        "minimum_version": limits.MINIMUM_VERSION_BYTES,
    }
    assert REGISTRY["exact_bytes"] == {
        "swarm_id": limits.SWARM_ID_BYTES,
        "content_id": limits.CONTENT_ID_BYTES,
        "fingerprint": limits.FINGERPRINT_BYTES,
        "key": limits.KEY_BYTES,
        "signature": limits.SIGNATURE_BYTES,
        "secret": limits.SECRET_BYTES,
        "life": limits.LIFE_BYTES,
        "session": limits.SESSION_BYTES,
        "swap": weights_messages.ID_BYTES,
        "transfer": limits.TRANSFER_BYTES,
        "chunk_hash": limits.CHUNK_HASH_BYTES,
        "crew": wire.HASH_BYTES,
        "crew_prefix": limits.CREW_PREFIX_BYTES,
        "record_hash": wire.HASH_BYTES,
        "crew_nonce": wire.NONCE_BYTES,
    }
    assert REGISTRY["counts"] == {
        "min_completions": limits.MIN_COMPLETIONS,
        "max_completions": limits.COMPLETIONS,
        "tokens": limits.TOKENS,
        "turns": limits.TURNS,
        "listed": limits.LISTED,
        "pulled": limits.PULLED,
        "peers": limits.PEERS,
        "peer_addresses": limits.PEER_ADDRESSES,
        "models": limits.MODELS,
        "protocols": limits.PROTOCOL_IDS,
        "tasks": limits.TASKS,
        "settings": limits.SETTINGS,
        "bootstrap": limits.BOOTSTRAP_ADDRESSES,
        "members": limits.MEMBERS,
        "bulk_chunks": limits.BULK_CHUNKS,
        "sessions": limits.SESSIONS,
        "summaries": limits.SUMMARIES,
        "index_bits": limits.INDEX_BITS,
        "block_bits": seeds.BLOCK_BITS,
        "integer_bits": limits.INTEGER_BITS,
        "difficulty": limits.DIFFICULTY,
        "fragments": weights_messages.FRAGMENTS,
        "blocks": weights_messages.BLOCKS,
        "retry_seconds": weights_messages.RETRY_SECONDS,
        "stages": limits.STAGES,
        "crew_members": MAX_MEMBERS,
        "held_blocks": wire.MAX_HELD_BLOCKS,
        "layers": wire.MAX_LAYERS,
        "micro_batches": limits.MICRO_BATCHES,
        "stage_waiting": limits.STAGE_WAITING,
        "stage_activation_block": limits.STAGE_ACTIVATION_BLOCK,
    }
    assert REGISTRY["floats"] == {
        "temperature": limits.TEMPERATURE,
        "token_logprob": limits.TOKEN_LOGPROB,
        "logprob_slack": limits.LOGPROB_SLACK,
        "spread": limits.SPREAD,
        "groups_per_second": limits.GROUPS_PER_SECOND,
        "crew_amount": 1e30,
    }
    assert REGISTRY["seconds"] == {
        "patience": limits.PATIENCE_SECONDS,
        "clock_skew": limits.CLOCK_SKEW_SECONDS,
        "group_age": limits.GROUP_AGE_SECONDS,
        "summary": limits.SUMMARY_SECONDS,
        "summary_age": limits.SUMMARY_AGE_SECONDS,
    }


def test_timeouts_match_the_registry():
    assert REGISTRY["timeouts"] == {
        "listing": ANSWER_SECONDS,
        "groups": fetch_deadline(limits.GROUP_BYTES),
        "peers": exchange.DEADLINE,
        "manifest": manifests.DEADLINE,
        "session": sessions.DEADLINE,
        "summary": summaries.DEADLINE,
        "weights": weights_discovery.REQUEST_SECONDS,
        "weights_state": state.ANSWER_SECONDS,
        "crews": service.REQUEST_TIMEOUT,
        "stage_open": service.OPEN_SECONDS,
        "stage_stream": service.PARK_SECONDS,
        "bulk_manifest": MANIFEST_TIMEOUT_SECONDS,
    }


def test_security_protocols_match_the_registry():
    assert REGISTRY["transport"]["security"] == [noise_transport.PROTOCOL_ID]
    assert REGISTRY["transport"]["private_security"] == [ids.PRIVATE_SECURITY]


def test_every_limit_is_in_the_registry():
    """A new constant in limits.py without a line in the registry fails."""
    registered = [
        value
        for table in ("bytes", "exact_bytes", "counts", "floats", "seconds")
        for value in REGISTRY[table].values()
    ]
    ours = [value for name, value in vars(limits).items() if name.isupper()]
    ours += [
        weights_messages.MESSAGE_BYTES,
        weights_messages.STATE_REQUEST_BYTES,
        weights_messages.STATE_BYTES,
        weights_messages.ID_BYTES,
        weights_messages.FRAGMENTS,
        weights_messages.RETRY_SECONDS,
    ]
    ours += [
        wire.MESSAGE_BYTES,
        wire.REASON_BYTES,
        wire.HASH_BYTES,
        wire.HASH_BYTES,
        wire.MAX_HELD_BLOCKS,
    ]
    ours += [wire.NONCE_BYTES, weights_messages.BLOCKS]
    ours += [wire.MAX_LAYERS, MAX_MEMBERS, wire.OPEN_BYTES, wire.CHUNK_BYTES, 1e30]
    assert sorted([*ours, seeds.BLOCK_BITS]) == sorted(registered)


def test_impossible_groups_match_the_registry():
    assert REGISTRY["rollouts"]["bytes_per_token"] == admission.BYTES_PER_TOKEN


def test_reputation_costs_match_the_registry():
    ours = {reason for reason, verdict in REASONS.items() if verdict is Verdict.REJECT}
    assert ours == set(REGISTRY["verdicts"]["reject"])
    assert ours >= {*DECODE_REASONS, "signature"}


def test_blameless_reasons_are_ignored():
    assert {REASONS[reason] for reason in REGISTRY["verdicts"]["ignore"]} == {Verdict.IGNORE}


def test_stage_frame_verdicts_match_the_registry():
    assert {name: set(reasons) for name, reasons in REGISTRY["stage_verdicts"].items()} == {
        "reject": {*wire.FRAME_REASONS, *STATE_REASONS},
        "ignore": {*FENCE_REASONS, *wire.STREAM_REFUSALS} - {"malformed"},
    }


def test_schemas_match_the_messages():
    written = {path.name: path.read_text() for path in (PROTOCOL / "schema").glob("*.json")}
    assert written == schemas() | weights_schemas() | stages_schemas(), (
        "run `python -m protocol.generate.{schema,schema_weights,schema_stages}`"
    )


def test_documents_name_every_registry_entry():
    text = "".join(path.read_text() for path in PROTOCOL.glob("0*.md"))
    names = [
        *REGISTRY["protocols"].values(),
        *REGISTRY["rules"].values(),
        *REGISTRY["domains"].values(),
    ]
    names += [f"`{name}`" for verdict in REGISTRY["verdicts"].values() for name in verdict]
    names += [
        f"`{name}`"
        for table in ("security", "private_security", "muxers")
        for name in REGISTRY["transport"][table]
    ]
    assert [name for name in names if name not in text] == []


@pytest.mark.parametrize(
    ("document", "table"), [("02-rollouts.md", "verdicts"), ("04-stages.md", "stage_verdicts")]
)
def test_document_verdicts_match_the_registry(document, table):
    given = re.findall(
        r"\[(REJECT|IGNORE)\] ((?:`\w+`(?:, )?)+)", (PROTOCOL / document).read_text()
    )
    verdicts = {
        (name, verdict.lower()) for verdict, names in given for name in re.findall(r"\w+", names)
    }
    assert verdicts == {
        (name, verdict) for verdict, names in REGISTRY[table].items() for name in names
    }
