"""Models whose weights a rank has in rows: on any number of ranks the values are those of the whole model."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from flexmarl.actors.messages import ModelConfig
from flexmarl.actors.pretrained import load_model, seeded_model, unset_model
from flexmarl.actors.trainer.backends.torch_policy import drawn_rows, model_rows, stored_tensors
from flexmarl.actors.trainer.backends.torch_policy.gang_rank import ALONE, GangRank
from flexmarl.actors.trainer.backends.torch_policy.model_rows import fill, outline
from flexmarl.actors.trainer.backends.torch_policy.saved_rows import saved_rows
from scripts.bench.memory_peaks import peak_bytes

SIZES = {
    "vocab_size": 51, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 3,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "tied": SIZES | {"model_type": "llama", "tie_word_embeddings": True},
    "untied": SIZES | {"model_type": "qwen3", "tie_word_embeddings": False},
    "experts": SIZES | {"model_type": "mixtral", "num_local_experts": 3},
    "more experts": SIZES
    | {"model_type": "qwen3_moe", "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    # Its layers draw a weight again that a module inside has drawn.
    "drawn twice": {
        "model_type": "gpt2", "vocab_size": 51, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": None,
        "eos_token_id": None,
    },
}  # fmt: skip


def config_of(model: str, **config: Any) -> ModelConfig:
    return ModelConfig(config=MODELS[model] | config, tokenizer="none")


def whole_from_ranks(
    config: ModelConfig, ranks: int, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    rows = [outline(config, 5, dtype, GangRank(rank, ranks))[1] for rank in range(ranks)]
    parts = [{name: give() for name, give in of_rank.items()} for of_rank in rows]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def same(actual: dict[str, Tensor], model: nn.Module) -> None:
    expected = dict(model.named_parameters())
    assert actual.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(actual[name].float(), expected[name])] == []


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("model", MODELS)
def test_drawn_rows_are_those_of_the_whole_model(
    model: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(model)
    whole = seeded_model(config, 5, torch.float32)
    monkeypatch.setattr(model_rows, "seeded_model", None)  # no rank has it whole
    state = torch.random.get_rng_state()
    same(whole_from_ranks(config, ranks), whole)
    assert torch.random.get_rng_state().equal(state)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(
    ("model", "files"),
    [
        *itertools.product(MODELS, ["one", "several"]),
        ("tied", "without the output layer"),
        ("drawn twice", "without the output layer"),
    ],
)
def test_rows_of_files_are_those_of_the_whole_model(
    model: str, ranks: int, files: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source: Any = seeded_model(config_of(model), 7, torch.bfloat16)
    if files == "without the output layer":
        source = source.base_model
    source.save_pretrained(tmp_path, max_shard_size="20KB" if files == "several" else "1GB")
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (files == "several")
    config = ModelConfig(path=str(tmp_path), tokenizer="none")
    whole = load_model(config, torch.float32)
    monkeypatch.setattr(model_rows, "seeded_model", None)  # no rank has it whole
    same(whole_from_ranks(config, ranks), whole)


def test_a_rank_reads_the_experts_of_its_rows_alone(tmp_path: Path) -> None:
    config = config_of("more experts", num_experts=32, num_hidden_layers=8)
    seeded_model(config, 7, torch.float32).save_pretrained(tmp_path)
    network, rows = outline(
        ModelConfig(path=str(tmp_path), tokenizer="none"), 5, torch.float32, GangRank(1, 4)
    )
    size = sum(parameter.nbytes for parameter in network.parameters())
    kept: list[Tensor] = []
    peak = peak_bytes(lambda: kept.extend(give() for give in rows.values()))
    assert size * 0.2 <= peak < size * 0.26, "rows of other tensors are views of the mapped file"


def test_other_conversions_than_that_of_experts_are_left_to_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeded_model(config_of("experts"), 7, torch.float32).save_pretrained(tmp_path)
    config = ModelConfig(path=str(tmp_path), tokenizer="none")
    monkeypatch.setattr(stored_tensors, "_merges_experts", lambda _: False)
    assert saved_rows(unset_model(config, torch.float32), str(tmp_path), ALONE.rows) is None
    same(whole_from_ranks(config, 2), load_model(config, torch.float32))


def test_tied_weights_that_a_file_has_twice_are_tied_only_if_they_are_equal(tmp_path: Path) -> None:
    seeded_model(config_of("tied"), 7, torch.float32).save_pretrained(tmp_path)
    file, config = tmp_path / "model.safetensors", ModelConfig(path=str(tmp_path), tokenizer="none")
    tensors = load_file(file)
    for output in (tensors["model.embed_tokens.weight"].clone(), torch.ones(51, 32)):
        save_file(tensors | {"lm_head.weight": output}, file, {"format": "pt"})
        same(whole_from_ranks(config, 2), load_model(config, torch.float32))


def test_a_weight_that_files_do_not_have_is_drawn_and_settings_of_the_generation_are_read(
    tmp_path: Path,
) -> None:
    source: Any = seeded_model(config_of("untied"), 7, torch.float32)
    source.generation_config.max_new_tokens = 17
    source.save_pretrained(tmp_path)
    file, config = tmp_path / "model.safetensors", ModelConfig(path=str(tmp_path), tokenizer="none")
    assert outline(config, 5, torch.float32, ALONE)[0].generation_config.max_new_tokens == 17
    tensors = load_file(file)
    del tensors["lm_head.weight"]
    save_file(tensors, file, {"format": "pt"})
    same(whole_from_ranks(config, 2), seeded_model(config, 5, torch.float32))


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("model", MODELS)
def test_a_filled_outline_is_the_model(model: str, seed: int | None) -> None:
    config = config_of(model)
    whole: Any = seeded_model(config, 5, torch.float32)
    network, rows = outline(config, seed, torch.float32, ALONE)
    assert all(parameter.is_meta for parameter in network.parameters())
    if seed is None:
        assert not rows
        rows = {name: tensor.detach for name, tensor in whole.named_parameters()}
    fill(network, network, rows, torch.device("cpu"))
    assert not rows and len(list(network.parameters())) == len(list(whole.parameters()))
    tokens = torch.tensor([[1, 2, 3, 4]])
    assert network(input_ids=tokens).logits.equal(whole(input_ids=tokens).logits)


def test_a_rank_draws_with_few_tensors_whole_at_a_time() -> None:
    config = config_of("untied", num_hidden_layers=24, hidden_size=64)
    size = sum(parameter.nbytes for parameter in outline(config, None, torch.float32, ALONE)[0].parameters())
    kept: list[Any] = []
    peak = peak_bytes(lambda: kept.append(outline(config, 5, torch.float32, GangRank(1, 4))))
    assert size / 4 <= peak < size * 0.35


class ChangedLater(nn.Module):
    """Changes a part of a weight when others were changed in between."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        first: Any = self.layers[0]
        with torch.no_grad():
            first.weight[0].zero_()


def test_a_part_of_a_weight_that_is_changed_later_has_the_model_drawn_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with drawn_rows.Drawing(torch.clone), pytest.raises(drawn_rows.DrawnAgain):
        ChangedLater()
    config = config_of("tied")
    whole = seeded_model(config, 5, torch.float32)

    def refuse(*_: object) -> None:
        raise drawn_rows.DrawnAgain("__getitem__")

    monkeypatch.setattr(model_rows, "drawn_model", refuse)
    same(whole_from_ranks(config, 2), whole)
