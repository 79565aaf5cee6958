"""Whole steps on a game of several turns where a server samples, and where several ranks do."""

import contextlib
import functools
import shutil
from importlib import resources
from unittest import mock

import pytest
import torch

from swarmnode.config import Config, TaskConfig
from swarmnode.policy.engine.protocol import FinishedRequest, GenerationStatistics, Request
from swarmnode.policy.generate import GroupSample, SampledCompletion, Sampling
from swarmnode.policy.load import load_policy
from swarmnode.rollouts.groups import actions
from swarmnode.rollouts.trainer.batch import assemble
from swarmnode.trainer.engine import make_whole_policy
from swarmnode.trainer.evaluate import Evaluation
from swarmnode.trainer.rank_pool import RankPool, on_device
from swarmnode.trainer.ranks import DataParallelPolicy, SharedGeneration
from swarmnode.trainer.sampler import MAX_LAG, Sampler
from swarmnode.trainer.state import Counters
from tests.support.games import WALK, WALK_TURNS, walking_game
from tests.support.served.standin import StandIn


@pytest.fixture(scope="module")
def scorer(tmp_path_factory):
    with walking_game(tmp_path_factory.mktemp("game")) as scorer:
        yield scorer


TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'user' %}<reply>{% endif %}"
    "{% endfor %}"
)
"""A chat template that only appends, as episodes require. The embedded policy's does not."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The embedded policy with another chat template."""
    folder = tmp_path_factory.mktemp("model") / "embedded"
    with resources.as_file(resources.files("swarmnode.policy") / "embedded") as own:
        shutil.copytree(own, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def configured(model, *options, **policy):
    return Config.model_validate(
        {
            "node": {"data_dir": model.parent},
            "policy": {"model": str(model), "threads": 1, **policy},
            "task": {"names": [WALK], "modules": [WALK], "held_out_per_task": 2},
            "weights": {"rule": "off"},
            "training": {
                "num_generations": 4,
                "groups_per_step": 2,
                "learning_rate": 2e-4,
                "max_completion_length": 8,
                "options": list(options),
            },
        }
    )


class Node:
    """A trainer without a network."""

    def __init__(self, config, policy, scorer, make=None):
        self.config, self.scorer = config, scorer
        self.counters = Counters(peer="12D3KooWme", swarm="00" * 32)
        self.engine = make_whole_policy(
            config, policy, self.counters, lambda message: None, make=make
        )
        self.sampler = Sampler(
            config.training,
            config.task.names,
            self.engine,
            scorer,
            policy.random_generator(0),
            self.counters,
        )

    def step(self):
        experience = self.sampler(2)
        update = self.engine.update(assemble(experience.trained, "grpo"))
        self.counters.policy_version += update.stepped
        return experience, update

    def evaluate(self):
        tasks: TaskConfig = self.config.task
        found = Evaluation(tasks, self.config.training, self.scorer)(self.engine, self.counters)
        assert found is not None
        return found.reward


def check_episodes(experience, scorer):
    """Every published episode has the actions of its turns, and replays to its end.

    `experience.played` may be zero: groups that an earlier step completed are taken first.
    """
    published = [each for message in experience.messages for each in message.completions]
    assert any(len(actions(each)) > 1 for each in published)
    for message in experience.messages:
        played = [actions(each) for each in message.completions if each.finish == "eos"]
        assert max(map(len, played), default=0) <= WALK_TURNS
        assert all(episode.done for episode in scorer.score(message.task, played).episodes)


# ---- a server ------------------------------------------------------------------------------------


@pytest.fixture(params=[0, 4])
def served(request, model, scorer):
    lora = {"lora": {"r": request.param}}
    first = configured(model, devices="cpu", **lora).policy
    with StandIn(load_policy(first)) as server:
        config = configured(model, "lockstep", devices="cpu", server={"url": server.url}, **lora)
        yield Node(config, load_policy(config.policy), scorer), server


def test_a_server_samples_every_turn_and_steps_learn_from_it(served, scorer):
    node, server = served
    for number in range(3):
        experience, update = node.step()
        check_episodes(experience, scorer)
        assert update.stepped
        assert max(experience.lags) <= MAX_LAG
        assert number or update.own_gap < 1e-4, "the first step is on policy to rounding"
    assert node.engine.statistics().engine == "served"
    asked = [body["sampling_params"]["n"] for body in server.bodies]
    assert {1, 4} <= set(asked), "a question has four first actions, a later turn has one"
    before = [value.clone() for value in node.engine._policy.trainable_parameters()]
    assert 0.0 <= node.evaluate() <= 1.0
    assert all(
        torch.equal(a, b)
        for a, b in zip(before, node.engine._policy.trainable_parameters(), strict=True)
    )
    groups = node.engine.generate(["12", "13"], Sampling(4, 8), node.engine.random_generator(5))
    assert [len(group.completions) for group in groups] == [4, 4]
    asked = [body for body in server.bodies if body["token_ids"] in [g.prompt_ids for g in groups]]
    assert asked[-1]["cache_salt"].split(".")[1] == "4", "one load at the start, one an update"
    assert node.engine.statistics().server.gap < 1e-4


def test_episodes_continue_without_the_server(served, scorer):
    node, server = served
    node.step()
    server.stop()
    for _ in range(2):
        experience, update = node.step()
        check_episodes(experience, scorer)
        assert update.stepped
    assert node.engine.statistics().engine == "lockstep"
    assert 0.0 <= node.evaluate() <= 1.0


# ---- several ranks -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("options", [("lockstep",), ("continuous",)])
def test_two_ranks_play_episodes_and_take_the_steps_of_one(model, scorer, options):
    config = configured(model, *options, devices=2)
    pool = RankPool(config, [torch.device("cpu")] * 2)
    with contextlib.closing(pool):
        policy = load_policy(on_device(config, pool._devices, 0).policy)
        node = Node(config, policy, scorer, functools.partial(DataParallelPolicy, pool))
        alone = Node(configured(model, *options, devices="cpu"), policy.clone(), scorer)
        for number in range(3):
            experience = node.sampler(2)
            check_episodes(experience, scorer)
            rows = assemble(experience.trained, "grpo")
            found, expected = node.engine.update(rows), alone.engine.update(rows)
            assert found.stepped
            assert found.loss == pytest.approx(expected.loss, abs=1e-5)
            assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-3)
            assert number or found.own_gap < 1e-4
            node.counters.policy_version += 1
        generation = node.sampler._generation
        assert all(generation._tokens.values()), "both ranks have sampled"
        assert node.evaluate() == pytest.approx(alone.evaluate(), abs=0.15), "other draws"


def test_later_turns_go_to_the_rank_of_their_rows():
    policy = load_policy(Config.model_validate({"policy": {"devices": "cpu"}}).policy)
    submitted, cancelled = [], []

    def tell(rank, command):
        submitted.extend(getattr(command, "submit", ()))
        cancelled.extend(getattr(command, "cancel", ()))

    pool = mock.MagicMock(count=2, others=range(1, 2), tell=tell)
    pool.answers.return_value, pool.is_busy.return_value = {}, False
    own = mock.Mock()
    own.finished.return_value, own.statistics.return_value = [], GenerationStatistics(0)
    generation = SharedGeneration(own, pool, policy, Sampling(3, 8), policy.random_generator(0))
    for number in range(2):  # one for each rank
        generation.submit(Request(number, "12", continues=True))
    generation.finished(0)
    (there,) = [one.number for one in submitted]
    done = FinishedRequest(there, GroupSample([1], [SampledCompletion([2], [0.0], "a", "eos")] * 3))
    generation._done.append(done)
    assert generation.finished(0) == [done]
    for turn in (-1, -2, -3):
        generation.submit(Request(turn, [1, 2, 3], 1, follows=there, continues=True))
    generation.cancel(there)
    generation.finished(0)
    assert [one.number for one in submitted] == [there, -1, -2, -3]
    assert cancelled == [there]
    assert own.submit.call_count == 1
    for turn in (-1, -2, -3):
        generation.cancel(turn)
    assert (generation._asked, generation._kept) == ({0: 0}, {0: 0}), "rank 0's first turn"
