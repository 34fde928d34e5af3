"""Groups of processes that exchange rows of tensors at the same time, by the libraries of their devices."""
