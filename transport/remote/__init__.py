"""The door of a process's host memory for other hosts: it serves states, and fetches those of other hosts."""
