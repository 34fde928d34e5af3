"""The search for the fastest division of a number of devices."""
