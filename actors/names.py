"""Types of the names and numbers that are easily confused: all are plain ``str`` and ``int`` at run time."""

from typing import NewType

AgentName = NewType("AgentName", str)
"""An LLM role of the workflow: prompts, sampling, rewards, credit assignment."""

PolicyName = NewType("PolicyName", str)
"""A set of trainable weights with its optimizer, loss and instances. One or more agents use it."""

Step = NewType("Step", int)
"""A step of the run, from 1 on."""

Version = NewType("Version", int)
"""Optimizer steps of one policy: 0 before its first."""

SlotName = NewType("SlotName", str)
"""A place of the training pool that computes for one policy at a time: a device, or a share of the CPU."""
