"""Random runs under random faults, in virtual time, and the checks of what they have trained."""
