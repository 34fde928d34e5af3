"""The other hosts of a run: they join it by key, and its actors run there too.

    head                                           another host
    flexmarl train RECIPE --nodes 1                flexmarl node --join runs/NAME/address
      Nodes  <──────── offer, join, stay ────────    node_process.py, membership.py
      RemoteNode ───── calls, exits ─────────────>   NodeActor ── processes

A node stays until it is dismissed, or its connection to the head is lost. Then it ends, with all its actors. Simulated
hosts join by the same messages (``launch/simulate/simulated_hosts.py``).
"""
