"""Host memory: states in blocks of shared memory, which all processes of a host read."""
