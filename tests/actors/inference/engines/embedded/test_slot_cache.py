"""The slot cache: rows move and buffers grow without a loss."""

import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from flexmarl.actors.inference.engines.embedded.slot_cache import SlotCache, slot_attention


def _cache(max_rows: int = 32, max_columns: int = 500) -> SlotCache:
    return SlotCache(max_rows, max_columns, torch.float32, torch.device("cpu"))


def _filled(cache: SlotCache, rows: int, columns: int, first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = torch.randn(2, rows, 2, columns, 4)
    cache.prefill(first, rows, columns)
    attended = cache.update(keys, values, 0)
    assert attended[0] is keys and attended[1] is values
    return keys, values


def _stored(cache: SlotCache, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys and values that decoding attends to, after a token was written to the cells behind."""
    between = cache.decode(rows, columns + 8)
    cache.write_to(torch.arange(rows) * between + columns)
    keys, values = cache.update(torch.ones(rows, 2, 1, 4), torch.full((rows, 2, 1, 4), 2.0), 0)
    assert (keys[:, :, columns] == 1).all() and (values[:, :, columns] == 2).all()
    return keys[:, :, :columns], values[:, :, :columns]


def test_growing_keeps_what_is_there_and_then_stops() -> None:
    cache = _cache()
    keys, values = _filled(cache, 3, 10)
    assert cache._keys[0].shape[:2] == (8, 64) and cache.capacity_tokens == 8 * 64
    _filled(cache, 17, 300, first=3)
    # Doubled, up to the limit, which is rounded up to whole column steps.
    assert cache._values[0].shape[:2] == (32, 504)
    buffers = cache._keys[0].data_ptr()
    stored_keys, stored_values = _stored(cache, 20, 300)
    assert stored_keys[:3, :, :10].equal(keys) and stored_values[:3, :, :10].equal(values)
    _filled(cache, 32, 500)
    assert cache._keys[0].data_ptr() == buffers


def test_rows_move_into_gaps() -> None:
    cache = _cache()
    keys, values = _filled(cache, 6, 10)
    cache.move([5, 4], [1, 3], 10)
    stored_keys, stored_values = _stored(cache, 4, 10)
    assert stored_keys.equal(keys[[0, 5, 2, 4]]) and stored_values.equal(values[[0, 5, 2, 4]])


def test_clear_forgets_what_is_not_a_number() -> None:
    cache = _cache()
    _filled(cache, 2, 4)
    cache._keys[0].fill_(torch.nan)
    cache.clear()
    assert not cache._keys[0].any()


def test_grouped_decoding_equals_the_stock_attention() -> None:
    module = nn.Module()
    module.num_key_value_groups = 3  # type: ignore[assignment]  # a plain attribute, as attention modules have it
    query, key, value = torch.randn(5, 6, 1, 8), torch.randn(5, 2, 20, 8), torch.randn(5, 2, 20, 8)
    lengths = torch.tensor([1, 20, 7, 13, 2])
    mask = torch.zeros(5, 1, 1, 20).masked_fill_(torch.arange(20) >= lengths.view(-1, 1, 1, 1), -torch.inf)
    ours, _ = slot_attention(module, query, key, value, mask, scaling=0.3)
    stock, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=0.3)
    torch.testing.assert_close(ours, stock)


def test_prompts_take_the_stock_attention() -> None:
    module = nn.Module()
    module.num_key_value_groups = 3  # type: ignore[assignment]  # a plain attribute, as attention modules have it
    query, key, value = torch.randn(5, 6, 9, 8), torch.randn(5, 2, 9, 8), torch.randn(5, 2, 9, 8)
    ours, _ = slot_attention(module, query, key, value, None)
    stock, _ = sdpa_attention_forward(module, query, key, value, None)
    assert ours.equal(stock)
