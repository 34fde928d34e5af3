"""The libraries whose tensors can travel: PyTorch's, and NumPy's arrays for processes that don't need PyTorch."""
