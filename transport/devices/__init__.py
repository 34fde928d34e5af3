"""Devices with memory of their own, behind one small interface: CUDA's, and a fake that keeps it in shared memory."""
