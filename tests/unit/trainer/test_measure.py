"""`swarmnode eval` with the embedded policy and a fixed scorer."""

from __future__ import annotations

import pytest
import torch

from swarmnode import cli
from swarmnode.config import DatasetConfig, PolicyConfig, TrainingConfig
from swarmnode.errors import Unavailable
from swarmnode.policy.load import load_policy, local_directory
from swarmnode.tasks import registry
from swarmnode.tasks.client import Scored
from swarmnode.tasks.measurement import Request
from swarmnode.trainer.measure import measure, open_model
from tests.support.registered import tasks_restored

IDS = torch.tensor([[5, 9, 17, 3, 8]])
CPU = PolicyConfig(devices="cpu", threads=1)


class Scorer:
    """Asks the same question repeatedly. The first answer, which is the greedy one, and every
    fourth of the others are right."""

    def __init__(self) -> None:
        self.judged: list[list[str]] = []

    def score_many(self, items):
        self.judged += [list(texts) for _, texts in items if texts]
        return [
            Scored("3+4=", [float(place % 4 == 0) for place in range(len(texts))])
            for _, texts in items
        ]


def test_greedy_and_pass_at_k_average_over_questions() -> None:
    scorer = Scorer()
    found = measure(
        load_policy(CPU),
        scorer,
        "builtin/sum",
        Request("", [], 20, 8, [1, 8]),
        TrainingConfig(max_completion_length=4),
    )
    assert (found.questions, found.greedy, found.reward) == (20, 1.0, 0.25)
    assert found.pass_at[1] == pytest.approx(0.25)
    assert found.pass_at[8] == 1.0
    assert found.error_at == {1: 0.0, 8: 0.0}
    assert 0 < found.tokens <= 4
    assert [len(texts) for texts in scorer.judged] == [9] * 20
    assert len({texts[0] for texts in scorer.judged}) == 1, (
        "greedy is the same to the same question"
    )
    assert len({text for texts in scorer.judged for text in texts[1:]}) > 1


def test_no_held_out_row_is_asked_twice(tmp_path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"prompt": "{i}+0=", "answer": "{i}"}}\n' for i in range(30)))
    with tasks_restored():
        registry.install_datasets({"data/few": DatasetConfig(source=str(rows))}, tmp_path)
        request = Request("", [], 20, 2, [1])
        training = TrainingConfig(max_completion_length=4)
        found = measure(load_policy(CPU), Scorer(), "data/few", request, training)
    assert found.questions == 3


@torch.no_grad()
def test_an_exported_adapter_is_opened_on_its_base(tmp_path) -> None:
    base = load_policy(CPU)
    adapted = load_policy(
        PolicyConfig.model_validate({"devices": "cpu", "threads": 1, "lora": {"r": 2}})
    )
    for parameter in adapted.trainable_parameters():
        parameter.add_(0.1)
    with local_directory(CPU) as directory:
        adapted.model.peft_config["default"].base_model_name_or_path = str(directory)
        adapted.model.save_pretrained(tmp_path / "adapter")
        opened = open_model(CPU.model_copy(update={"model": str(tmp_path / "adapter")}))
    assert torch.allclose(
        opened.model(input_ids=IDS).logits, adapted.model(input_ids=IDS).logits, atol=1e-5
    )
    assert not torch.allclose(
        opened.model(input_ids=IDS).logits, base.model(input_ids=IDS).logits, atol=1e-2
    )
    (tmp_path / "adapter" / "adapter_model.safetensors").rename(
        tmp_path / "adapter" / "adapter_model.bin"
    )
    with pytest.raises(
        Unavailable,
        match=r"holds an adapter without adapter_model.safetensors, the only format that is read",
    ):
        open_model(CPU.model_copy(update={"model": str(tmp_path / "adapter")}))


@pytest.mark.parametrize(
    "more", [["--samples", "64"], ["--questions", "0"], ["--k", "17"], ["--k", "0"]]
)
def test_impossible_arguments_are_one_line(more, tmp_path, capsys) -> None:
    assert cli.run(["eval", "embedded", "-d", str(tmp_path), *more]) == 78
    assert "--samples 1 to 63" in capsys.readouterr().err
