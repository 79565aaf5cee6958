"""06-tasks: questions, rewards and versions of the builtin tasks, by the Python of the document."""

from check_frames import code

TEXT = code("06-tasks.md")
READERS = {}
DERIVATIONS = {
    "builtin_question": lambda **given: list(TEXT.question(**given)),
    "builtin_reward": TEXT.reward,
    "builtin_version": TEXT.version,
}
