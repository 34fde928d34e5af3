"""The recipe's supervised batches, before the first step."""

from collections.abc import Awaitable, Callable
from typing import Final

from ..errors import RecipeError
from ..messages import TrainerApi
from ..recipe.recipe import Recipe
from ..run_events import SftDone
from .orchestrator_setup import OrchestratorSetup

_CHUNK: Final = 10


async def fine_tune(
    setup: OrchestratorSetup,
    recipe: Recipe,
    trainer: TrainerApi,
    tell_console: Callable[..., Awaitable[None]],
    is_stopped: Callable[[], bool],
) -> bool:
    """Trains the supervised batches of all policies, in chunks, so that progress shows; True if all of them are
    trained, and there are any. ``is_stopped``: True once the run has been asked to end. Raises RecipeError if the
    recipe has no batches."""
    for policy, settings in setup.policies.items():
        batches = settings.sft_batches
        if batches and not recipe.defines("sft"):
            raise RecipeError(
                f"policy {policy} has sft.batches={batches}, but the recipe's workflow.py defines no sft"
            )
        for done in range(0, batches, _CHUNK):
            if is_stopped():
                return False
            await tell_console("phase", f"supervised fine-tuning of {policy}", done, batches)
            loss = await trainer.sft(policy, done, min(_CHUNK, batches - done))
        if batches:
            await tell_console("event", SftDone(policy, batches, loss))
    return any(settings.sft_batches for settings in setup.policies.values())
