"""A turn in pieces: one version goes on where new weights interrupted the one before. Pure.

    GenerateRequest ──> Generation "interrupted" ──> the same request, behind what there is ──> ... "stop", "length"

What was generated is kept (partial rollouts: APRIL, arXiv 2509.18521; AReaL's interruptible generation, arXiv
2505.24298, section 4.1). It stays tokens: the next version reads them as part of its prompt and computes its own keys
and values for them. Every token's log-probability is that of the version that drew it.
"""

from dataclasses import replace

from ..messages import GenerateRequest, Generation


class ResumableTurn:
    """A turn while it is generated, and then its result."""

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        """For what is still to come; of this version or a later one."""
        self.ended = False
        self.text = ""
        self.prompt_tokens: tuple[int, ...] = ()
        self.logprobs: tuple[float, ...] = ()
        self.policy_version = request.policy_version
        """Of the first token."""
        self.version_changes: tuple[int, ...] = ()
        """As ``Sample`` has them."""
        self._newest = request.policy_version

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.request.completion

    def take(self, generation: Generation) -> None:
        """What ``request`` was answered with."""
        version = generation.policy_version
        if generation.tokens:
            if not self.tokens:
                self.policy_version = version
            elif version != self._newest:
                self.version_changes += (len(self.tokens), version)
            self._newest = version
        self.text = generation.text
        self.prompt_tokens = generation.prompt_tokens
        self.logprobs += generation.logprobs
        self.ended = generation.finish_reason != "interrupted"
        self.request = replace(
            self.request,
            prompt=(generation.prompt_tokens,),
            completion=self.tokens + generation.tokens,
        )
        if not self.ended:
            self.overtaken(version)

    def overtaken(self, version: int) -> None:
        """``version`` is no longer served: ``request`` is of a later one."""
        self.request = replace(self.request, policy_version=version + 1)
