"""06-tasks: questions, rewards and versions of tasks, by the Python of the document."""

from check_frames import code

TEXT = code("06-tasks.md")
READERS = {}
DERIVATIONS = {
    "builtin_question": lambda **given: list(TEXT.question(**given)),
    "builtin_reward": TEXT.reward,
    "builtin_version": TEXT.version,
    "chat_question": lambda **given: list(TEXT.chat_question(**given)),
    "chat_reward": TEXT.chat_reward,
    "chat_version": TEXT.chat_version,
    "states": TEXT.states,
}
