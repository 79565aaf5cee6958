"""`python tests/support/standin/check.py FOLDER` prints the parameters of the verifiers functions
that swarmnode calls, one line for each.

The output must be equal for the stand-in (this folder) and for the site-packages of an environment
with the real package.
"""

import inspect
import sys

sys.path.insert(0, sys.argv[1])

import verifiers.v1 as vf
from verifiers.v1.utils import decorators, loaders

MODELS = {
    "TaskData": ("prompt", "system_prompt"),
    "Trace": ("id", "verifiers", "task", "agent", "nodes"),
    "TraceTask": ("type", "data"),
    "MessageNode": ("parent", "message", "sampled"),
    "UserMessage": ("content",),
    "AssistantMessage": ("content",),
    "VersionInfo": ("version",),
    "TasksetConfig": ("id", "task"),
}
for name, fields in MODELS.items():
    print(
        name,
        *(
            f"{field}{'' if getattr(vf, name).model_fields[field].is_required() else '?'}"
            for field in fields
        ),
    )
for called in (
    vf.Task.__init__,
    vf.Task.plugged_judges,
    vf.Task.hooks,
    vf.Task.data_type,
    vf.Taskset.__init__,
    vf.Taskset.load,
    vf.Taskset.task_type,
    decorators.invoke,
    decorators.reward,
    decorators.metric,
    loaders.taskset_class,
    loaders.taskset_config_type,
    loaders.load_taskset,
):
    parameters = inspect.signature(called).parameters.values()
    print(
        called.__qualname__,
        *(f"{one.name}{'' if one.default is one.empty else '?'}" for one in parameters),
    )
print(
    vf.Task.NEEDS_CONTAINER,
    vf.Taskset.INFINITE,
    isinstance(vf.Taskset.bounded, property),
    isinstance(vf.TaskData.prompt_text, property),
)
print(
    isinstance(vf.Trace.last_reply, property),
    vars(vf.reward(weight=2.0)(lambda: None)).keys() >= {"reward", "_vf_weight"},
)
