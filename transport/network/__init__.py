"""Bulk between hosts: the server of a process's states, and the fetching of states from other hosts."""
