"""The libraries whose tensors can travel: PyTorch's, and NumPy's arrays."""
