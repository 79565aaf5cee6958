"""06-tasks: questions, rewards and versions of the builtin tasks."""

import hashlib

VERSIONED = {
    "builtin/copy": '["2", "builtin/copy", ["swarmnode", "1"], "copy", {"digits": 3}, 256]',
    "builtin/sum": '["2", "builtin/sum", ["swarmnode", "1"], "sum", {"terms": 2}, 256]',
}


def digits(word, address):
    digest = hashlib.blake2b(f"swarmnode/builtin/{word}/{address}".encode()).digest()
    return [int.from_bytes(digest[at : at + 2], "big") % 10 for at in (0, 2, 4)]


def question(task, seed, index):
    a, b, c = digits(task.removeprefix("builtin/"), seed + index)
    if task == "builtin/copy":
        return f"Copy {a}{b}{c}:", f"{a}{b}{c}"
    return f"{a}+{b}=", str(a + b)


def find_answer(text):
    before, end, _ = text.rpartition("</answer>")
    _, start, answer = before.rpartition("<answer>")
    return answer.strip() if end and start else text


def reward(task, seed, index, text):
    _, right = question(task, seed, index)
    answer = find_answer(text)
    if answer != text and not text.endswith("</answer>"):
        return 0.0
    if len(answer.encode()) > 256:
        return 0.0
    if task == "builtin/sum":
        return float(answer == right)
    return sum(answer[at : at + 1] == digit for at, digit in enumerate(right)) / max(
        len(answer), len(right)
    )


READERS = {}
DERIVATIONS = {
    "builtin_question": lambda task, seed, index: list(question(task, seed, index)),
    "builtin_reward": reward,
    "builtin_version": lambda task: hashlib.blake2b(
        VERSIONED[task].encode(), digest_size=8
    ).hexdigest(),
}
