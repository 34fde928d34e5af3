"""TRL's side of the race, in a process of its own: ``python trl_side.py MODEL STEPS OUT``.

Trains the model in the folder ``MODEL`` for ``STEPS`` steps as ``config.yaml`` says, then writes to the folder
``OUT`` the trained model and ``result.json``: per step the seconds, the completion tokens and the mean reward,
and the gradient norm of the first step. The settings for speed and their reasons are in ``race_trl.py``'s docstring.
"""

import argparse
import json
import runpy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from flexmarl.launch.config.config_reading import resolve
from flexmarl.launch.config.run_config import RunConfig

HERE = Path(__file__).parent


class Stopwatch(TrainerCallback):
    """Seconds from the end of one step to the end of the next, and how the training fares."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.grad_norm: float | None = None
        self._last_end = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._last_end = time.perf_counter()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **context: Any) -> None:
        if self.grad_norm is None:  # of the first step, which is never counted: measuring it takes time
            gradients = [p.grad for p in context["model"].parameters() if p.grad is not None]
            self.grad_norm = float(torch.nn.utils.get_total_norm(gradients))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        now = time.perf_counter()
        self.seconds.append(now - self._last_end)
        self._last_end = now


class RewardFunction:
    """The recipe's ``reward`` as TRL calls it, once a step, with the whole batch."""

    __name__ = "digits"

    def __init__(self, reward: Callable[[str], float]) -> None:
        self._reward = reward
        self.means: list[float] = []
        self.tokens: list[int] = []

    def __call__(self, completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        rewards = [self._reward(completion) for completion in completions]
        self.means.append(sum(rewards) / len(rewards))
        self.tokens.append(sum(map(len, completion_ids)))
        return rewards


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    config = resolve(str(HERE), [])
    (policy,) = config.policies.values()
    recipe = runpy.run_path(str(HERE / "workflow.py"))
    count = arguments.steps * config.training.queries_per_step
    prompts = [recipe["train_query"](position, config.seed).text for position in range(count)]
    stopwatch, rewards = Stopwatch(), RewardFunction(recipe["reward"])
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32),
        reward_funcs=rewards,
        args=GRPOConfig(**grpo_settings(config, arguments.steps, arguments.out)),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=AutoTokenizer.from_pretrained(policy.real_model.tokenizer_source),
        callbacks=[stopwatch],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    trainer.model.save_pretrained(arguments.out)
    result = {
        "seconds": stopwatch.seconds,
        "tokens": rewards.tokens,
        "rewards": rewards.means,
        "grad_norm": stopwatch.grad_norm,
    }
    (arguments.out / "result.json").write_text(json.dumps(result))


def grpo_settings(config: RunConfig, steps: int, out: Path) -> dict[str, Any]:
    """``GRPOConfig``'s keyword arguments: the race's task, and nothing that only costs time."""
    (agent,), (policy,) = config.agents.values(), config.policies.values()
    training, optimizer = config.training, policy.optimizer
    return {
        # the task, as flexmarl has it
        "max_steps": steps,
        "per_device_train_batch_size": training.queries_per_step * training.trajectories_per_query,
        "num_generations": training.trajectories_per_query,
        "shuffle_dataset": False,
        "max_completion_length": agent.sampling.max_new_tokens,
        "temperature": agent.sampling.temperature,
        "top_p": 1.0,
        "top_k": 0,
        "beta": 0.0,
        "loss_type": "dapo",
        "epsilon": policy.algorithm.clip_low,
        "epsilon_high": policy.algorithm.clip_high,
        "scale_rewards": "group" if agent.algorithm.scale_rewards else "none",
        "learning_rate": optimizer.lr,
        "lr_scheduler_type": optimizer.schedule,
        "adam_beta1": optimizer.betas[0],
        "adam_beta2": optimizer.betas[1],
        "adam_epsilon": optimizer.eps,
        "weight_decay": optimizer.weight_decay,
        "max_grad_norm": optimizer.max_grad_norm,
        "seed": config.seed,
        # speed
        "optim": "adamw_torch_fused",
        "num_iterations": 1,
        "gradient_accumulation_steps": 1,
        "gradient_checkpointing": False,
        "disable_dropout": True,
        "use_cpu": True,
        "bf16": False,
        "dataloader_num_workers": 0,
        "dataloader_pin_memory": False,
        "logging_strategy": "no",
        "save_strategy": "no",
        "eval_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "output_dir": str(out),
    }


if __name__ == "__main__":
    main()
