"""Nodes with different training terms never share a crew; the manifest states how crews train."""

from swarmnode.config import Config
from swarmnode.stages.trainer.crew_model import crew_terms
from swarmnode.stages.trainer.pipeline import gradient_codec
from swarmnode.swarm.manifest import AGREED_KEYS

BASE = bytes(32)


def terms(**sections):
    return crew_terms(Config.model_validate(sections)).hash(BASE)


def test_nodes_of_one_configuration_name_one_model():
    local = {"capacity": 10**9, "checkpoint_every": 7, "policy_copy": "disk"}
    assert terms() == terms(node={"name": "another"}, stages=local)


def test_terms_cover_every_setting_of_training():
    other = [
        {"stages": {"codec": "bfloat16"}},
        {"stages": {"recovery": "checkfree"}},
        {"stages": {"recovery": "checkfree+"}},
        {"policy": {"lora": {"r": 4}}},
        {"policy": {"lora": {"r": 8}}},
        {"training": {"learning_rate": 1e-5}},
    ]
    named = [terms(), *(terms(**sections) for sections in other)]
    named.append(crew_terms(Config()).hash(b"\1" * 32))
    assert len(set(named)) == len(other) + 2


def test_a_swarm_agrees_on_how_its_crews_train():
    assert {"stages.codec", "stages.recovery"} <= set(AGREED_KEYS)


def test_gradients_are_rounded_to_bfloat16_at_most():
    codecs = {codec: gradient_codec(codec) for codec in ("float32", "bfloat16", "int8")}
    assert codecs == {"float32": "float32", "bfloat16": "bfloat16", "int8": "bfloat16"}
