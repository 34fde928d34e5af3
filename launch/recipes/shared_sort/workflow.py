"""Two agents with one policy learn to sort digits: the task, the prompts and the rewards are those of sort-digits.

    31542=          the sorter answers   12354
    31542?12354=    the checker answers  12345

Both are the same weights here, which know their role by the form of the prompt.
"""

from flexmarl.launch.recipes.sort_digits.workflow import eval_queries, sft, train_query, workflow

__all__ = ["eval_queries", "sft", "train_query", "workflow"]
