import torch

from flexmarl.actors.trainer.backends.torch_policy.device_copy import copy_together, pack, unpack

TENSORS = [
    torch.tensor([[1, 2, 3], [4, 5, 6]]),
    torch.tensor([True, False, True]),
    torch.tensor([0.5, -1.0], dtype=torch.float64).unsqueeze(1),
    torch.empty(0),
    torch.tensor([1.5]),
]


def test_tensors_of_any_dtype_come_out_of_the_buffer_as_they_went_in() -> None:
    buffer = pack(TENSORS, pinned=False)
    for tensor, copy in zip(TENSORS, unpack(buffer, TENSORS), strict=True):
        assert copy.dtype == tensor.dtype and torch.equal(copy, tensor)
        assert copy.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()


def test_a_change_of_one_tensor_leaves_the_others_fit_for_a_backward() -> None:
    for device in ("cpu", "meta"):
        flags, factors = unpack(
            pack([TENSORS[1], TENSORS[4]], pinned=False).to(device), [TENSORS[1], TENSORS[4]]
        )
        weight = torch.ones(1, device=device, requires_grad=True)
        product = weight * factors
        flags.logical_not_()
        torch.autograd.backward(product.sum())
        assert (flags._version, factors._version) == (1, 0)
        assert weight.grad is not None and (device == "meta" or weight.grad == 1.5)


def test_a_device_gets_one_copy() -> None:
    copies = copy_together(TENSORS, torch.device("meta"))
    assert len({copy.untyped_storage()._cdata for copy in copies}) == 1
    assert [(copy.device.type, copy.dtype, copy.shape) for copy in copies] == [
        ("meta", tensor.dtype, tensor.shape) for tensor in TENSORS
    ]


def test_the_cpu_gets_none() -> None:
    copies = copy_together(TENSORS, torch.device("cpu"))
    assert all(copy is tensor for copy, tensor in zip(copies, TENSORS, strict=True))
