"""CartPole with one agent and many observers: PyTorch's RPC tutorial, on farcall.

Rank 0 is the agent. It owns the policy and learns. The other ranks are observers: each owns an
environment, asks the agent for every action and reports every reward. No message is written by
hand: the agent holds references (RRefs) to the observers, the observers get one to the agent, and
both just call methods.

The recipe is REINFORCE as in https://docs.pytorch.org/tutorials/intermediate/rpc_tutorial.html,
but an episode ends when its environment says so, and a run repeats exactly for a given seed.
`docs/cartpole.md` walks through this file.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import gymnasium
import torch
from torch import Tensor, nn

from farcall import rpc
from farcall.demos.progress import Monitor

ENVIRONMENT = "CartPole-v1"
STATE, HIDDEN, ACTIONS = 4, 128, 2
DROPOUT = 0.6


@dataclass(frozen=True)
class CartpoleOptions:
    """The options of a run: two runs with equal options take the same actions."""

    observers: int
    seed: int
    gamma: float
    max_episodes: int
    goal: float


@dataclass(frozen=True)
class CartpoleProgress:
    """The state of a training run after an episode.

    Attributes:
        episode: episodes done, from 1.
        reward: reward of this episode.
        running_reward: exponentially averaged reward.
        env_steps: steps that all environments took so far.
        calls: remote calls made so far.
        seconds: time since training began.
        solved: whether this episode met the goal.
    """

    episode: int
    reward: float
    running_reward: float
    env_steps: int
    calls: int
    seconds: float
    solved: bool

    @property
    def env_steps_per_second(self) -> float:
        """Environment steps per second, over the whole run so far."""
        return self.env_steps / self.seconds if self.seconds else 0.0

    @property
    def calls_per_second(self) -> float:
        """Remote calls per second, over the whole run so far."""
        return self.calls / self.seconds if self.seconds else 0.0


def threshold() -> float:
    """Return the running reward at which the environment counts as solved: 475."""
    reward = gymnasium.spec(ENVIRONMENT).reward_threshold
    assert reward is not None
    return reward


class PolicyNetwork(nn.Module):
    """Says how likely each action is: two layers, 4-128-2, with dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(STATE, HIDDEN)
        self.output = nn.Linear(HIDDEN, ACTIONS)

    def forward(self, state: Tensor, mask: Tensor) -> Tensor:
        """Log-probabilities `(..., 2)` for states `(..., 4)` under dropout masks `(..., 128)`."""
        hidden = torch.relu(self.hidden(state) * mask)
        return torch.log_softmax(self.output(hidden), dim=-1)


class Trajectory:
    """The agent's memory of one observer's episode, and that observer's random numbers."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.clear()

    def clear(self) -> None:
        """Forgets the episode. The random numbers go on."""
        self.states: list[Tensor] = []
        self.masks: list[Tensor] = []
        self.actions: list[Tensor] = []
        self.rewards: list[float] = []

    def draw_mask(self) -> Tensor:
        """Return a dropout mask `(128,)`, from this observer's own random numbers."""
        kept = torch.rand(HIDDEN, generator=self.generator) >= DROPOUT
        return kept / (1 - DROPOUT)

    def returns(self, gamma: float) -> Tensor:
        """Return, for every step, the discounted sum of the rewards from there on."""
        returns: list[float] = []
        following = 0.0
        for reward in reversed(self.rewards):
            following = reward + gamma * following
            returns.append(following)
        return torch.tensor(returns[::-1])


class Observer:
    """Owns an environment and plays it as the agent says. Lives on its own worker."""

    def __init__(self, observer_id: int, seed: int) -> None:
        self.id = observer_id
        self.env = gymnasium.make(ENVIRONMENT)
        self.env.reset(seed=seed)

    def run_episode(self, agent_rref: rpc.RRef[CartpoleAgent]) -> None:
        """Plays until the pole falls or time is up, with two calls to the agent every step."""
        state, _ = self.env.reset()
        done = False
        while not done:
            action = agent_rref.rpc_sync().select_action(self.id, torch.from_numpy(state))
            state, reward, terminated, truncated, _ = self.env.step(action)
            agent_rref.rpc_sync().report_reward(self.id, float(reward))
            done = terminated or truncated


class CartpoleAgent:
    """Owns the policy and improves it. Observers call its methods from their processes.

    Several observers call at once, each in a thread of its own here. They share only the policy,
    which does not change while episodes run; each writes its own trajectory only. So there is
    nothing to lock.
    """

    def __init__(self, options: CartpoleOptions) -> None:
        torch.manual_seed(options.seed)
        self.options = options
        self.policy = PolicyNetwork()
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=1e-2)
        self.running_reward = 0.0
        self.env_steps = 0
        self.calls = 0
        self.trajectories: dict[int, Trajectory] = {}
        self.observer_rrefs: dict[int, rpc.RRef[Observer]] = {}
        self.agent_rref = rpc.RRef(self)

    def add_observer(self, worker: str, observer_id: int) -> None:
        """Makes an observer on a worker, with an environment and random numbers of its own."""
        seed = 1000 * self.options.seed + observer_id
        observer = rpc.remote(worker, Observer, args=(observer_id, seed))
        self.observer_rrefs[observer_id] = observer
        self.trajectories[observer_id] = Trajectory(seed)

    def select_action(self, observer_id: int, state: Tensor) -> int:
        """Draw an action for an observer's `state`, shape `(4,)`, from the policy."""
        trajectory = self.trajectories[observer_id]
        mask = trajectory.draw_mask()
        with torch.no_grad():
            probabilities = self.policy(state, mask).exp()
        action = torch.multinomial(probabilities, 1, generator=trajectory.generator)
        trajectory.states.append(state)
        trajectory.masks.append(mask)
        trajectory.actions.append(action)
        return int(action)

    def report_reward(self, observer_id: int, reward: float) -> None:
        """Record the reward of an observer's last action."""
        self.trajectories[observer_id].rewards.append(reward)

    def play(self) -> list[Trajectory]:
        """Lets all observers play one episode at the same time, and returns what they played."""
        futures = [
            observer_rref.rpc_async().run_episode(self.agent_rref)
            for observer_rref in self.observer_rrefs.values()
        ]
        for future in futures:
            future.wait()
        return list(self.trajectories.values())

    def learn(self, played: list[Trajectory]) -> None:
        """Make a REINFORCE step on the last episodes: actions that paid off become more likely."""
        returns = torch.cat([trajectory.returns(self.options.gamma) for trajectory in played])
        advantages = (returns - returns.mean()) / (returns.std() + torch.finfo(torch.float32).eps)
        states = torch.stack([state for trajectory in played for state in trajectory.states])
        masks = torch.stack([mask for trajectory in played for mask in trajectory.masks])
        actions = torch.stack([action for trajectory in played for action in trajectory.actions])
        log_probabilities = self.policy(states, masks).gather(1, actions).squeeze(1)
        loss = -(log_probabilities * advantages).sum()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def train(self) -> Iterator[CartpoleProgress]:
        """Plays and learns until the environment counts as solved. Yields after every episode."""
        start = time.perf_counter()
        for episode in range(1, self.options.max_episodes + 1):
            played = self.play()
            self.learn(played)
            progress = self.take_stock(played, episode, time.perf_counter() - start)
            yield progress
            if progress.solved:
                return

    def is_solved(self) -> bool:
        """Return whether the goal is met."""
        return self.running_reward > self.options.goal

    def take_stock(
        self, played: list[Trajectory], episode: int, seconds: float
    ) -> CartpoleProgress:
        """Counts the episode just played, and clears the trajectories for the next one."""
        reward = min(sum(trajectory.rewards) for trajectory in played)
        steps = sum(len(trajectory.rewards) for trajectory in played)
        for trajectory in played:
            trajectory.clear()
        self.running_reward = 0.05 * reward + 0.95 * self.running_reward
        self.env_steps += steps
        self.calls += 2 * steps + len(played)
        return CartpoleProgress(
            episode=episode,
            reward=reward,
            running_reward=self.running_reward,
            env_steps=self.env_steps,
            calls=self.calls,
            seconds=seconds,
            solved=self.is_solved(),
        )


def run_worker(
    rank: int, options: CartpoleOptions, init_method: str, monitor: Monitor[CartpoleProgress]
) -> None:
    """Run a process of the demo: rank 0 trains, the others wait for calls."""
    torch.set_num_threads(1)
    rpc.init_rpc(
        "agent" if rank == 0 else f"observer{rank}",
        rank=rank,
        world_size=options.observers + 1,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(init_method=init_method),
    )
    if rank == 0:
        agent = CartpoleAgent(options)
        for observer_id in range(1, options.observers + 1):
            agent.add_observer(f"observer{observer_id}", observer_id)
        for progress in agent.train():
            monitor.report(progress)
            if monitor.stop_requested():
                break
    rpc.shutdown()
