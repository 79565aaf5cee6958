"""Episodes between nodes, in virtual time: their messages, their replay, and the cost of a forged
one."""

import msgspec
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.demo.liar.author import BUILTIN_TASKS, swarm_of
from swarmnode.rollouts import groups
from swarmnode.rollouts.groups import GroupRules, OwnGroup
from swarmnode.rollouts.network.admission import SCORER_ACTIONS, CandidateQueue
from swarmnode.rollouts.reasons import REASONS, Verdict
from swarmnode.wire import envelope, limits
from swarmnode.wire.messages import Turn
from tests.support.authors import Author, episode, forged_episodes
from tests.support.fakes.scorer import InProcessScorer
from tests.support.games import HIGH, TURNS, guessing_game
from tests.support.groups import external_group
from tests.support.pulling import SWARM, Holder, PullSwarm, clock, rewards_of

CHARACTERS = st.characters(codec="utf-8", exclude_categories=["Cs"])


@pytest.fixture
def game(tmp_path):
    with guessing_game(tmp_path) as task:
        yield task


@pytest.fixture
async def swarm(game, nursery):
    """Two nodes of a swarm that plays the game."""
    return await PullSwarm(2, rules=GroupRules((game,)), swarm=swarm_of(tasks=(game,))).start(
        nursery
    )


async def secret_of(task):
    """Return the number that wins the question at an address, as an action."""
    guesses = [str(number) for number in range(1, HIGH + 1)]
    (scored,) = await InProcessScorer().score_many([(task, [[guess] for guess in guesses])])
    return guesses[scored.rewards.index(1.0)]


async def episodes_of(task):
    """Return an episode that wins with its second action, one that gives up, one that ends by its
    number of turns, and one of a single action."""
    secret = await secret_of(task)
    wrong = [str(number) for number in range(1, HIGH + 1) if str(number) != secret]
    return [[wrong[0], secret], [wrong[1], wrong[2], "0"], (wrong * 2)[:TURNS], [secret]]


async def honest_group(author, sequence=0):
    episodes = await episodes_of(author.task(sequence))
    return author.group(sequence, clock(), episodes=episodes)


async def own_group(author, sequence=0):
    group = await honest_group(author, sequence)
    return OwnGroup(
        group.task,
        group.policy_version,
        group.sequence,
        group.sampling,
        group.completions,
        await rewards_of(group),
    )


async def settle():
    await trio.sleep(60)


@given(st.lists(st.text(CHARACTERS, max_size=6), min_size=1, max_size=limits.TURNS))
def test_joined_turns_are_split_again(texts):
    made = episode(texts)
    assert groups.actions(made) == texts
    assert groups.turn_ids(made) == [[ord(c) for c in text] or [0] for text in texts]
    assert groups.played_actions(msgspec.structs.replace(made, finish="length")) == texts[:-1]
    bare = msgspec.structs.replace(made, token_ids=b"", logprobs=b"")
    assert groups.turn_ids(bare) == [[] for _ in texts]


async def test_an_episode_travels_as_its_actions(swarm, autojump_clock):
    own = await own_group(swarm.authors[0])
    assert own.rewards == [1.0, 0.25, 0.0, 1.0]
    assert swarm.exchanges[0].publish(own) == "published"
    await settle()
    (group,) = swarm.draw(1, 2)
    assert group.group.completions == own.completions
    assert group.rewards == own.rewards
    assert group.prompt == f"I am thinking of a number from 1 to {HIGH}."
    assert [len(texts) for texts in group.observations] == [2, 3, TURNS, 1]
    assert group.observations[0][-1] == "right"
    assert group.observations[1][-1] == "you give up"
    assert swarm.pulling(1).claims.confirmed == 1


async def test_a_cut_action_is_not_given_to_the_environment(swarm, autojump_clock):
    own = await own_group(swarm.authors[0])
    *_, last = own.completions
    cut = episode([*groups.actions(own.completions[2])[:1], "1"], finish="length")
    own = msgspec.structs.replace(own, completions=[cut, last], rewards=[0.0, 1.0])
    assert swarm.exchanges[0].publish(own) == "published"
    await settle()
    (group,) = swarm.draw(1, 2)
    assert group.rewards == [0.0, 1.0]
    assert [len(texts) for texts in group.observations] == [1, 1]


FORGED = list(
    forged_episodes(Author(SWARM).group(0, 0.0, episodes=[["1", "2"], ["3"]], texts=None))
)


@pytest.mark.parametrize("name", FORGED)
async def test_a_forged_episode_is_refused_for_its_reason(swarm, name, autojump_clock):
    liar = Author(swarm.authors[0].swarm, 78, swarm.authors[0].tasks)
    holder = Holder(swarm.medium, author=liar)
    forged, reason = forged_episodes(await honest_group(liar))[name]
    frame = liar.sign(msgspec.msgpack.encode(forged))
    listed = await holder.line(liar.frame(await honest_group(liar, 1)), rewards=[0.0, 1.0])
    holder.put(await claim(holder, listed, frame), frame)
    await settle()
    assert swarm.outcomes(0).pop(reason) == 1
    assert swarm.admitted_of(0, liar) == 0
    assert swarm.draw(0) == []
    blamed = swarm.networks[0].score(liar.peer) < 0
    assert blamed == (REASONS[reason] is Verdict.REJECT)
    await holder.add_frame(liar.frame(await honest_group(liar, 2)))
    await settle()
    assert swarm.admitted_of(0, liar) == 1  # it is one group that was lost


async def claim(holder, listed, frame):
    """A true entry of a listing for a frame that cannot be decoded."""
    return msgspec.structs.replace(
        listed, content=envelope.content_id(frame), size=len(frame), created_at=int(clock() * 1000)
    )


async def test_rewards_and_observations_are_those_of_the_replay(swarm, autojump_clock):
    """An author that lists its group with another spread gains the reward of its actions only."""
    liar = Author(swarm.authors[0].swarm, 78, swarm.authors[0].tasks)
    holder = Holder(swarm.medium, author=liar)
    frame = liar.frame(await honest_group(liar))
    await holder.add_frame(frame, rewards=[0.0, 0.0, 1.0, 0.0])
    await settle()
    (group,) = swarm.draw(0)
    assert group.rewards == [1.0, 0.25, 0.0, 1.0]
    assert swarm.pulling(0).claims.faults == {"spread": 1}


async def test_a_shouting_environment_is_bounded(swarm, autojump_clock):
    liar = Author(swarm.authors[0].swarm, 78, swarm.authors[0].tasks)
    secret = await secret_of(liar.task(0))
    texts = [["shout", "shout", secret], ["shout", "0"]]
    await Holder(swarm.medium, author=liar).add_frame(
        liar.frame(liar.group(0, clock(), episodes=texts))
    )
    await settle()
    (group,) = swarm.draw(0)
    sizes = [[len(text.encode()) for text in each] for each in group.observations]
    assert max(map(max, sizes)) <= 4096
    assert groups.memory_bytes(group.group, group.prompt, group.observations) > 3 * 4000


@pytest.mark.parametrize("texts", [None, [["1"], ["2"]]])
async def test_own_groups_have_turns_where_their_task_has(game, nursery, texts, autojump_clock):
    """An answer to the game, and an episode of a task of one turn, are not published."""
    tasks = BUILTIN_TASKS if texts else (game,)
    swarm = PullSwarm(1, rules=GroupRules(tasks), swarm=swarm_of(tasks=tasks))
    await swarm.start(nursery)
    author = swarm.authors[0]
    made = author.group(0, 0.0, texts=None if texts else ["1", "2"], episodes=texts)
    own = OwnGroup(made.task, 0, 0, made.sampling, made.completions, [0.0, 1.0])
    assert swarm.exchanges[0].publish(own) == "invalid"


def test_scorer_batch_has_bounded_actions():
    turns, whole, queue = (
        [Turn(0, 1)] * (SCORER_ACTIONS // 8),
        external_group("a", 0).group,
        CandidateQueue(),
    )
    made = [msgspec.structs.replace(c, turns=turns) for c in whole.completions]  # two of them
    group = msgspec.structs.replace(whole, completions=made)
    for number in range(5):
        assert queue.put(groups.Candidate(number.to_bytes(32, "big"), "a", group))
    assert [len(queue.take(32)) for _ in range(3)] == [4, 1, 0]
