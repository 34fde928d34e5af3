"""Tensors over memory of others, on the one device that this machine has."""

import ctypes

import torch

from flexmarl.transport.device_memory.raw_tensors import tensor_at


def test_a_tensor_is_the_memory_itself() -> None:
    memory = (ctypes.c_ubyte * 100)(*range(100))
    tensor = tensor_at(ctypes.addressof(memory), 100, torch.device("cpu"))
    assert (tensor.dtype, tensor.shape) == (torch.uint8, (100,)) and tensor.tolist() == list(range(100))
    tensor[3:5] = 77
    assert list(memory[2:6]) == [2, 77, 77, 5]
    words = tensor[8:24].view(torch.int64)
    del tensor
    assert words.view(torch.uint8).tolist() == list(range(8, 24))


def test_no_bytes_are_a_tensor_too() -> None:
    assert tensor_at(0, 0, torch.device("cpu")).shape == (0,)
