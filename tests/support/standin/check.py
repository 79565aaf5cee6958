"""`python tests/support/standin/check.py FOLDER` prints the parameters of the verifiers functions
that swarmnode calls, one line for each.

The output must be equal for the stand-in (this folder) and for the site-packages of an environment
with the real package.
"""

import inspect
import sys

sys.path.insert(0, sys.argv[1])

import verifiers.v1 as vf
from verifiers.v1 import session
from verifiers.v1.configs import agent
from verifiers.v1.state import State, state_cls
from verifiers.v1.utils import decorators, loaders

MODELS = {
    "TaskData": ("prompt", "system_prompt"),
    "Trace": (
        "id",
        "verifiers",
        "task",
        "agent",
        "nodes",
        "state",
        "rewards",
        "metrics",
        "ok",
        "stop_condition",
    ),
    "TraceTask": ("type", "data"),
    "MessageNode": ("parent", "message", "sampled"),
    "SystemMessage": ("content",),
    "UserMessage": ("content",),
    "AssistantMessage": ("content",),
    "VersionInfo": ("version",),
    "TasksetConfig": ("id", "task"),
    "EnvConfig": ("taskset",),
    "AgentConfig": (
        "model",
        "client",
        "max_turns",
        "max_input_tokens",
        "max_output_tokens",
        "max_total_tokens",
    ),
    "Episode": ("id", "task", "ok", "traces"),
}
OPTIONAL = ("root_reply",)
"""Parameters with a default that swarmnode does not give."""

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
    vf.Taskset.toolsets,
    vf.Task.toolsets,
    vf.Task.setup,
    vf.Task.finalize,
    vf.Trace.record_reward,
    vf.Trace.record_metric,
    vf.Trace.stop,
    vf.Segment,
    vf.Env.__init__,
    vf.Env.setup,
    vf.Env.run,
    vf.Env.finalize,
    vf.Env.start,
    state_cls,
    agent.agent_config_fields,
    session.hook_boundary,
    decorators.discover_decorated,
    decorators.invoke,
    decorators.stop,
    decorators.intercept,
    decorators.reward,
    decorators.metric,
    loaders.taskset_class,
    loaders.taskset_config_type,
    loaders.load_taskset,
    loaders.environment_class,
    loaders.env_config_type,
):
    parameters = inspect.signature(called).parameters.values()
    print(
        called.__qualname__,
        *(
            f"{one.name}{'' if one.default is one.empty else '?'}"
            for one in parameters
            if one.name not in OPTIONAL
        ),
    )
print(
    vf.Task.NEEDS_CONTAINER,
    vf.Taskset.INFINITE,
    isinstance(vf.Taskset.bounded, property),
    isinstance(vf.TaskData.prompt_text, property),
)
print(
    isinstance(vf.Trace.last_reply, property),
    isinstance(vf.Trace.num_turns, property),
    isinstance(vf.Segment.last_reply, property),
    issubclass(vf.SingleAgentEnv, vf.Env),
    issubclass(vf.State, State),
    vars(vf.reward(weight=2.0)(lambda: None)).keys() >= {"reward", "_vf_weight"},
)
