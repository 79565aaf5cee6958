"""Trainers of a crew probe the average of another crew's stage while they train, with threads and
sockets."""

import contextlib
import threading

import pytest
import torch
import trio

from swarmnode.config import Config, PolicyConfig
from swarmnode.policy.build_deep import write_deep_model
from swarmnode.policy.load import load_policy
from swarmnode.policy.ways import Row
from swarmnode.process import Progress
from swarmnode.stages import trainer as stage_trainer
from swarmnode.stages.trainer import CrewPolicy, CrewTrainer
from swarmnode.stages.wire import CrewEnd
from swarmnode.trainer.batch import TrainingGroup, assemble
from swarmnode.weights import local
from swarmnode.weights.fragments import pack
from tests.support.crew_network import crew_network
from tests.support.waiting import until

WEIGHTS = {"rule": "noloco", "fragments": 1}
EVERYTHING = pack(range(64))
STAGES = {"mode": "always"}


@pytest.fixture
def model(tmp_path):
    torch.set_num_threads(1)
    return write_deep_model(tmp_path / "model", layers=4)


def only_wait(monkeypatch):
    """A head that runs only the calls of a test until it is stopped."""
    monkeypatch.setattr(CrewTrainer, "_lead", lambda self, crew, scorer: self._stop.wait())


@contextlib.asynccontextmanager
async def crew(tmp_path, model):
    """Yield (network, trainers, update). Training happens only in `update(step)`."""
    directories = [tmp_path / f"node{i}" for i in range(2)]
    configs = [
        Config.model_validate(
            {
                "node": {"data_dir": d},
                "weights": WEIGHTS,
                "stages": STAGES,
                "policy": {"model": str(model), "devices": "cpu"},
                # small steps, because a busy machine may take any number of them meanwhile
                "training": {"learning_rate": 1e-6},
            }
        )
        for d in directories
    ]
    async with crew_network(directories, [2, 2]) as network, trio.open_nursery() as nursery:
        trainers = [CrewTrainer(c, Progress()) for c in configs]
        for trainer in trainers:
            nursery.start_soon(trio.to_thread.run_sync, trainer.run)
        try:
            await until(lambda: network.running, seconds=60)
            head = trainers[0]
            engine = CrewPolicy(
                head._config.training,
                head._model,
                head._runner,
                head._runner.led_lineage(),
                threading.Event(),
            )
            policy = load_policy(PolicyConfig(model=str(model), devices="cpu"))
            prompts = [policy.encode_prompt(p) for p in ("What is 3 + 4?", "Calculate 10 + 8.")]

            async def update(step):
                generator = torch.Generator().manual_seed(step)
                groups = []
                for prompt in prompts:
                    rows = [
                        Row(prompt, torch.randint(4, 100, (n,), generator=generator).tolist())
                        for n in (3, 1, 5, 2)
                    ]
                    groups.append(
                        TrainingGroup(
                            rows,
                            [[-4.0] * len(c) for _, c, *_ in rows],
                            [1.0, 0.0, 0.0, 1.0],
                            [1.0] * 4,
                        )
                    )
                rows = assemble(groups, "grpo")
                assert (await trio.to_thread.run_sync(lambda: engine.update(rows))).stepped

            yield network, trainers, update
        finally:
            for trainer in trainers:
                trainer.stop()


async def test_stages_receive_the_verdict_before_a_commit(tmp_path, model, monkeypatch):
    only_wait(monkeypatch)
    verdicts, judge = [], stage_trainer._judge

    async def heard(peer, known, rewarded, mine, mean, tell, seconds):
        both = lambda losses: (verdicts.append((peer.stage.spec.index, losses)), tell(losses))
        await judge(peer, known, rewarded, mine, mean, both, seconds)

    monkeypatch.setattr(stage_trainer, "_judge", heard)
    said = lambda node, kind: [
        m for m in node.averaging if isinstance(m, kind) and m.session == b"s" * 16
    ]
    async with crew(tmp_path, model) as (network, _, update):
        for step in range(2):
            await update(step)  # 8 completions that were better than their group
        for node in network.nodes:
            node.link.send_to_trainer(local.TakeSnapshot(b"s" * 16, 0, EVERYTHING))
            await until(lambda node=node: said(node, local.SnapshotWritten))
            (ours,) = said(node, local.SnapshotWritten)  # of a partner with equal weights
            node.link.send_to_trainer(
                local.ApplyPayload(b"s" * 16, 0, "peer", ours.outer_step, ours.path, EVERYTHING)
            )
        for step in range(2, 40):
            await update(step)
            await trio.sleep(0.05)
            if all(said(node, local.SwapEnded) for node in network.nodes):
                break
        ended = local.SwapEnded(b"s" * 16, 0, "peer", "accepted", True, 1)
        assert [said(node, local.SwapEnded) for node in network.nodes] == [[ended]] * 2
        assert sorted(stage for stage, _ in verdicts) == [0, 1]
        assert all(
            found.before == pytest.approx(found.after, abs=0.002) and found.before > 0.1
            for _, found in verdicts
        )


async def test_exchange_after_the_crew_ended_is_refused(tmp_path, model, monkeypatch):
    only_wait(monkeypatch)
    ended = lambda node: [m for m in node.averaging if isinstance(m, local.SwapEnded)]
    async with crew(tmp_path, model) as (network, trainers, update):
        await update(0)
        head = network.nodes[0]
        head.offering = None
        head.link.send_to_trainer(CrewEnd("a member is gone"))
        # another thread handles the message
        await until(lambda: not all(trainer._runner.active for trainer in trainers), seconds=20)
        await until(lambda: head.offering is not None, seconds=60)  # the stage is in no crew now
        head.link.send_to_trainer(
            local.ApplyPayload(b"s" * 16, 0, "peer", 1, str(tmp_path / "payload"), EVERYTHING)
        )
        head.link.send_to_trainer(local.TakeSnapshot(b"t" * 16, 0, EVERYTHING))
        head.link.send_to_trainer(local.WriteState())
        await until(lambda: local.StateWritten("", 0, []) in head.averaging, seconds=60)
        assert ended(head) == [
            local.SwapEnded(session, 0, "", "local", False, 0) for session in (b"s" * 16, b"t" * 16)
        ]
