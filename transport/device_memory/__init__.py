"""Device memory: states in buffers that other processes open by handle: CUDA's, or those of a fake device."""
