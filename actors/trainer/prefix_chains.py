"""Samples of which one begins with all tokens of another: turns of a trajectory whose prompts extend each other. Pure.

A causal model computes the tokens of a prefix as if nothing followed. So the longest of such samples is a row in which
the completions of all of them have their log-probabilities, and their gradients: ten turns are one forward of the last
one's tokens, and no sample's loss is another.
"""

from collections.abc import Sequence


def prefix_chains(samples: Sequence[bytes], prompts: Sequence[int]) -> list[list[int]]:
    """Divides samples into chains in which the prompt of each begins with the whole sample before it.

    ``samples``: the tokens of prompt and completion, as many bytes each; ``prompts``: bytes of each one's prompt.
    Returns the numbers of the samples of each chain, the shortest first; every sample is in exactly one, so that a
    branch of a conversation begins a chain of its own. The chains are in the order of their longest samples: without
    prefixes they are the samples themselves.
    """
    chains: list[list[int]] = []
    # The samples that begin the one at hand and that no other continues yet, by their chains. Sorted, all that begin
    # with a sample come right behind it. The longest is taken first: it has the fewest others to continue it.
    open_chains: list[list[int]] = []
    for number in sorted(range(len(samples)), key=samples.__getitem__):
        tokens = samples[number]
        while open_chains and not tokens.startswith(samples[open_chains[-1][-1]]):
            open_chains.pop()
        place = len(open_chains) - 1
        while place >= 0 and len(samples[open_chains[place][-1]]) > prompts[number]:
            place -= 1
        if place < 0:
            chain = [number]
            chains.append(chain)
        else:
            chain = open_chains.pop(place)
            chain.append(number)
        open_chains.append(chain)
    return sorted(chains, key=lambda chain: chain[-1])
