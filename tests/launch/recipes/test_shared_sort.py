"""The built-in recipe of two agents on one policy: the task of sort-digits, and one model of two layers."""

from transformers import AutoConfig, AutoTokenizer

from flexmarl.actors.names import AgentName, PolicyName
from flexmarl.actors.recipe.recipe import Recipe
from flexmarl.launch.config.config_reading import recipe_folder, resolve

SHARED = PolicyName("shared")
SORTER, CHECKER = AgentName("sorter"), AgentName("checker")


def test_the_task_is_that_of_sort_digits() -> None:
    shared, own = (Recipe(resolve(name, []).recipe_config()) for name in ("shared-sort", "sort-digits"))
    assert [shared.train_query(n) for n in range(20)] == [own.train_query(n) for n in range(20)]
    assert shared.eval_queries() == own.eval_queries()
    assert shared.sft("checker", 3, 8) == own.sft("checker", 3, 8)


def test_both_agents_use_one_policy_of_two_layers() -> None:
    config = resolve("shared-sort", [])
    assert list(config.policies) == [SHARED] and config.agents_of(SHARED) == (SORTER, CHECKER)
    policy = config.policies[SHARED]
    tokenizer = AutoTokenizer.from_pretrained(policy.real_model.tokenizer_source)
    assert policy.real_model.tokenizer == str(recipe_folder("sort-digits") / "tokenizer")
    model = AutoConfig.for_model(**(policy.real_model.config or {}))
    assert (model.num_hidden_layers, model.vocab_size) == (2, len(tokenizer))
    assert (model.eos_token_id, model.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    longest_problem = Recipe(config.recipe_config()).train_query(0).text
    for agent in config.agents.values():
        answer = agent.sampling.max_new_tokens
        assert answer == len(longest_problem) + 1
        assert len(f"{longest_problem}?=") + 2 * answer <= model.max_position_embeddings
