"""Gymnasium's toy text games as episode tasks.

Every process reads the tables. Only the scorer child imports the library, before it enters its
sandbox, and only for games that the node trains on.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from swarmnode.errors import ConfigError
from swarmnode.tasks import own, owner_code, seeds
from swarmnode.wire.limits import TURNS as MOST_TURNS

VERSION = "1"
"""Part of the task version. Change it when a text or a reward below changes."""

Step = Callable[[str], tuple[str, float, bool]]


@dataclass(frozen=True, slots=True)
class Game:
    """A game that can be named in `task.names`."""

    name: str
    """Name of the game in Gymnasium."""
    settings: Mapping[str, object]
    """Setting of `task.settings` → default."""

    @property
    def turns(self) -> int:
        return own.read_turns(self.settings)


def _game(name: str, turns: int = MOST_TURNS, **settings: object) -> Game:
    return Game(name, MappingProxyType({own.TURNS: turns, **settings}))


GAMES: Mapping[str, Game] = MappingProxyType(
    {
        "gym/FrozenLake-v1": _game("FrozenLake-v1", is_slippery=True, map_name="4x4", size=4),
        "gym/Taxi-v4": _game("Taxi-v4", is_rainy=False, fickle_passenger=False),
        "gym/CliffWalking-v1": _game("CliffWalking-v1", is_slippery=False),
        "gym/Blackjack-v1": _game("Blackjack-v1", 12, natural=False, sab=False),
    }
)
"""Task id → game."""


class GameTask:
    """A game with its settings, as `episodes.Player` plays it. Imports Gymnasium.

    Raises:
        ConfigError: The library is missing or does not have the game.
    """

    weights: Mapping[str, float] = MappingProxyType({})

    def __init__(self, task: str, settings: Mapping[str, object]) -> None:
        self._task, self.turns = task, own.read_turns(settings)
        given = {name: value for name, value in settings.items() if name != own.TURNS}
        try:
            with owner_code.cached_bytecode():
                self._begin = _load_game(GAMES[task].name, given)
        except Exception as error:
            raise ConfigError(f"{task} cannot be loaded: {owner_code.one_line(error)}") from error

    def start(self, seed: int, index: int) -> tuple[str, Step]:
        return self._begin(seeds.environment_seed(seed, index))


def load(tasks: Mapping[str, Mapping[str, object]]) -> dict[str, GameTask]:
    """Load games before the process enters its sandbox. Raises ConfigError."""
    if not tasks:
        return {}
    with owner_code.guard_imports(", ".join(tasks)):
        return {task: GameTask(task, settings) for task, settings in tasks.items()}


# Gymnasium's environments return numbers: a state and a reward. The tasks return texts and a reward
# of 0 to 1.


@dataclass(frozen=True, slots=True)
class ToyText:
    """Texts and reward range that turn a Gymnasium environment into a text game."""

    rules: str
    actions: Sequence[str]
    """Words for the actions 0, 1, …"""
    show: Callable[[Any, Any], str]
    """(environment, observation) → text."""
    worst: float
    """Sum of Gymnasium's rewards at or below which the reward is 0."""
    best: float
    """Sum of Gymnasium's rewards at or above which the reward is 1."""
    ending: Callable[[Any, float], str]
    """(environment, last reward) → text at the end."""
    has_map: bool = False
    """True if the first text has the environment's map."""


def _load_game(name: str, settings: dict[str, object]) -> Callable[[int], tuple[str, Step]]:
    """Return a function that begins an episode from a seed of 32 bits."""
    import gymnasium
    from gymnasium.envs.registration import load_env_creator

    spec, toy = gymnasium.spec(name), TOY_TEXTS[name]
    creator: Callable[..., Any] = load_env_creator(str(spec.entry_point))
    arguments: dict[str, object] = {**spec.kwargs, **settings}
    size = arguments.pop("size", 0)
    frozen_lake = importlib.import_module("gymnasium.envs.toy_text.frozen_lake")

    def begin(seed: int) -> tuple[str, Step]:
        if arguments.get("map_name") == "random":
            arguments["desc"] = frozen_lake.generate_random_map(size, seed=seed)
        environment = creator(**arguments)
        observation, _ = environment.reset(seed=seed)
        listed = ", ".join(toy.actions)
        earned = 0.0

        def step(action: str) -> tuple[str, float, bool]:
            nonlocal earned
            word = _find_action(action, toy.actions)
            if word is None:
                return f"That is no action. Say one of: {listed}.", 0.0, False
            observation, reward, ended, _, _ = environment.step(toy.actions.index(word))
            earned += float(reward)
            text = toy.show(environment, observation)
            if not ended:
                return text, 0.0, False
            score = min(1.0, max(0.0, (earned - toy.worst) / (toy.best - toy.worst)))
            return f"{text}\n{toy.ending(environment, float(reward))}", score, True

        slippery = "\nYou slip: a step may go to the side." if settings.get("is_slippery") else ""
        rows = [b"".join(row).decode() for row in environment.desc] if toy.has_map else []
        shown = "\n".join([*rows, toy.show(environment, observation)])
        return f"{toy.rules}{slippery}\nSay one of: {listed}.\n{shown}", step

    return begin


def _find_action(text: str, actions: Sequence[str]) -> str | None:
    """Return the last word of `text` that is an action."""
    words = [word for word in re.findall("[a-z]+", text.lower()) if word in actions]
    return words[-1] if words else None


def _show_lake(environment: Any, state: Any) -> str:  # noqa: ANN401 # the library has no types
    grid = [[cell.decode() for cell in row] for row in environment.desc]
    row, column = divmod(int(state), len(grid[0]))
    grid[row][column] = "Y"
    return "\n".join("".join(cells) for cells in grid)


def _describe_lake_end(environment: Any, reward: float) -> str:  # noqa: ANN401
    return "You reached the goal." if reward > 0 else "You fell into a hole."


def _show_cliff(environment: Any, state: Any) -> str:  # noqa: ANN401
    grid = [["."] * 12 for _ in range(3)] + [["S", *"CCCCCCCCCC", "G"]]
    row, column = divmod(int(state), 12)
    grid[row][column] = "Y"
    return "\n".join("".join(cells) for cells in grid)


_PLACES = (("R", 0, 0), ("G", 0, 4), ("Y", 4, 0), ("B", 4, 3))


def _show_taxi(environment: Any, state: Any) -> str:  # noqa: ANN401
    row, column, passenger, goal = environment.decode(int(state))
    waiting = "in the taxi" if passenger == len(_PLACES) else f"at {_PLACES[passenger][0]}"
    return (
        f"The taxi is at row {row}, column {column}. The passenger is {waiting} and wants to go to"
        f" {_PLACES[goal][0]}."
    )


def _show_blackjack(environment: Any, observation: Any) -> str:  # noqa: ANN401
    total, dealer, ace = (int(value) for value in observation)
    usable = " with an ace that counts 11" if ace else ""
    return f"Your cards add up to {total}{usable}. The dealer shows {dealer}."


def _describe_blackjack_end(environment: Any, reward: float) -> str:  # noqa: ANN401
    return "You win." if reward > 0 else "You lose." if reward < 0 else "It is a draw."


TOY_TEXTS: Mapping[str, ToyText] = MappingProxyType(
    {
        "FrozenLake-v1": ToyText(
            "Cross the frozen lake. Y is you, F is ice, H is a hole, G is the goal, S the start.",
            ("left", "down", "right", "up"),
            _show_lake,
            0.0,
            1.0,
            _describe_lake_end,
        ),
        # Each step costs 1, and bringing the passenger earns 20: 20 steps or fewer are worth 1.
        "Taxi-v4": ToyText(
            "Drive the taxi to the passenger, pick the passenger up, drive to where the passenger"
            " wants to go, drop the passenger off. In the map | is a wall and : is none. Rows and"
            " columns count from 0 inside the frame; south is down.",
            ("south", "north", "east", "west", "pickup", "dropoff"),
            _show_taxi,
            -20.0,
            0.0,
            lambda environment, reward: "The passenger has arrived.",
            has_map=True,
        ),
        # Each step costs 1, a fall 100: 20 steps or fewer without a fall are worth 1.
        "CliffWalking-v1": ToyText(
            "Walk to the goal. Y is you, G is the goal, C is the cliff, S the start. A step off the"
            " cliff leads back to the start.",
            ("up", "right", "down", "left"),
            _show_cliff,
            -120.0,
            -20.0,
            lambda environment, reward: "You reached the goal.",
        ),
        "Blackjack-v1": ToyText(
            "Blackjack: come closer to 21 than the dealer, and not above it.",
            ("stick", "hit"),
            _show_blackjack,
            -1.0,
            1.0,
            _describe_blackjack_end,
        ),
    }
)
